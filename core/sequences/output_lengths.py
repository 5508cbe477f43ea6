"""Predicts the lengths of outputs from those that have ended. Pure arithmetic, O(1) per request."""

from collections import OrderedDict
from typing import NamedTuple

from penstock.core.sequences.sequence import Request

_FIRST_GUESS = 256.0
"""Predicted output tokens before any output has ended, unless the request allows fewer."""

_TRUST = 4.0
"""The more general mean counts like this many outputs, against those that the special mean has seen."""

_MEMORY = 64.0
"""A mean covers about this many of the last outputs."""

_MAX_TENANTS = 4096
"""With more tenants, those that have finished nothing for the longest time are forgotten."""


class _Mean(NamedTuple):
    value: float
    weight: float  # number of outputs, up to _MEMORY

    def with_one_more(self, value: float) -> "_Mean":
        weight = min(self.weight + 1, _MEMORY)
        return _Mean(self.value + (value - self.value) / weight, weight)


_NOTHING = _Mean(0.0, 0.0)
_Lengths = dict[int, _Mean]
"""Means by the size of the prompt: the bit length of its number of tokens."""


class LengthPredictor:
    """Predicts output tokens by tenant and prompt length.

    There are four means: of all outputs, of prompts of about this length, of this tenant, and of this tenant's prompts
    of about this length. The fewer outputs a mean has seen, the more it is pulled towards the one before it. So a new
    tenant is predicted like the others, and a tenant with many outputs by its own.
    """

    __slots__ = ("_all", "_by_tenant")

    def __init__(self) -> None:
        self._all: _Lengths = {}
        self._by_tenant: OrderedDict[str, _Lengths] = OrderedDict()

    def learn(self, request: Request, num_outputs: int) -> None:
        """A sequence of the request has ended with this many tokens of output."""
        tenant = self._by_tenant.setdefault(request.tenant, {})
        self._by_tenant.move_to_end(request.tenant)
        if len(self._by_tenant) > _MAX_TENANTS:
            self._by_tenant.popitem(last=False)
        size = request.num_prompt_tokens.bit_length()
        for lengths in (self._all, tenant):
            for key in (_ANY, size):
                lengths[key] = lengths.get(key, _NOTHING).with_one_more(num_outputs)

    def predict(self, request: Request) -> float:
        """Return the tokens of output that a sequence of the request will probably have, at most what it allows."""
        size = request.num_prompt_tokens.bit_length()
        expected = _FIRST_GUESS
        for lengths in (self._all, self._by_tenant.get(request.tenant)):
            if lengths is not None:
                for key in (_ANY, size):
                    value, weight = lengths.get(key, _NOTHING)
                    expected += (value - expected) * weight / (weight + _TRUST)
        return min(expected, request.max_len - request.num_prompt_tokens)


_ANY = -1
"""Key for prompts of all sizes."""
