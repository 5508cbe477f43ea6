"""One row that follows a grammar: the tokens it has sampled decide what it may sample next."""

from array import array
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from penstock.gpu_worker.devices.device import Download
from penstock.gpu_worker.grammars.store import Prototype
from penstock.ipc.messages import SamplingParams

Words = npt.NDArray[np.int32]

_FULL = "too many states"
"""llguidance's message for an automaton that has reached its size limit."""

_MIN_TOKENS_PER_RENEWAL = 16
"""A row that fills a new automaton within fewer tokens would keep on creating new ones."""


class DrawnToken(NamedTuple):
    """A token that may not have reached the host yet: one int32 of a step's output."""

    download: Download
    place: int

    def wait(self) -> int:
        """The token; blocks until the device has sampled it."""
        return int(np.frombuffer(self.download.wait(), dtype=np.int32, count=1, offset=4 * self.place)[0])


class GrammarRow:
    """All methods but `expect` run in the thread that fills masks."""

    def __init__(self, prototype: Prototype | None, sampling: SamplingParams, output_token_ids: Iterable[int]) -> None:
        """`output_token_ids`: outputs known already, after a preemption or a restart."""
        self._prototype = prototype
        self._sampling = sampling
        self._known = list(output_token_ids)
        self._drawn: deque[DrawnToken] = deque()
        self._matcher: LLMatcher | None = None
        self._mask: Words = np.zeros((1, 0), dtype=np.int32)
        self._generation = 0  # of the automaton that the matcher uses
        self._followed = array("i")  # the tokens that the matcher has consumed
        self._renewed_at = -_MIN_TOKENS_PER_RENEWAL
        self._num_outputs = 0
        self._has_stopped = False  # at a stop token: what is sampled after it is dropped
        self._error = ""

    def expect(self, token: DrawnToken) -> None:
        """A step was launched that samples the row's next token."""
        self._drawn.append(token)

    def prepare(self) -> None:
        """Advance the matcher over the known tokens."""
        if self._prototype is None:
            self._error = "the grammar was not prepared"
            return
        self._matcher, self._generation = self._prototype.copy()
        self._mask = np.zeros((1, -(-self._prototype.vocabulary.vocab_size // 32)), dtype=np.int32)
        for token_id in self._known:
            self._follow(token_id)

    def fail(self, error: str) -> None:
        """Sample no more tokens, for a reason outside the grammar."""
        self._error = error

    def fill(self, words: Words, num_tokens: int) -> str:
        """Write what may be sampled after all tokens launched so far; waits until they are known.

        Args:
            words: int32[W], the row's bits as `kernels.token_masks` takes them.
            num_tokens: size of the model's vocabulary; no token beyond it may be sampled.

        Returns:
            Why no token is possible, else empty. In that case, and if the token will be dropped, all bits are set.
        """
        while self._drawn:
            self._follow(self._drawn.popleft().wait())
        words[:] = -1
        if self._error or self._has_stopped:
            return self._error
        is_complete = self._fill_mask()
        if self._error:
            return self._error
        params = self._sampling
        width = min(self._mask.shape[1], words.shape[0])
        words[:] = 0
        words[:width] = self._mask[0, :width]
        stops = _bits(params.stop_token_ids, words.shape[0], num_tokens)
        if self._num_outputs < params.min_tokens:
            words &= ~stops  # like the sampler
        elif is_complete:
            words |= stops
        if params.allowed_token_ids:
            words &= _bits(params.allowed_token_ids, words.shape[0], num_tokens)
        if num_tokens & 31:
            words[-1] &= (1 << (num_tokens & 31)) - 1
        if not words.any():
            words[:] = -1
            limits = [name for name in ("min_tokens", "allowed_token_ids") if getattr(params, name)]
            self._error = f"the grammar{''.join(f' with {name}' for name in limits)} allows no token " + (
                f"after the first {self._num_outputs}"
            )
        return self._error

    def _fill_mask(self) -> bool:
        """Write the matcher's allowed tokens into the mask; return whether the text may end here."""
        matcher = self._matcher
        assert matcher is not None, "prepare comes first"
        is_complete = matcher.is_stopped()
        self._mask[:] = 0
        if not is_complete:
            fill_next_token_bitmask(matcher, self._mask)
            is_complete = matcher.is_accepting()
        if not matcher.is_error():
            return is_complete
        if self._renew():
            return self._fill_mask()
        self._error = f"the grammar cannot go on after {self._num_outputs} tokens: {matcher.get_error()[:200]}"
        return False

    def _renew(self) -> bool:
        """Continue with a new automaton, if the one shared with other rows is full."""
        matcher, prototype = self._matcher, self._prototype
        if matcher is None or prototype is None or _FULL not in matcher.get_error():
            return False
        if self._num_outputs - self._renewed_at < _MIN_TOKENS_PER_RENEWAL or not prototype.renew(self._generation):
            return False
        self._renewed_at = self._num_outputs
        self._matcher, self._generation = prototype.copy()
        return bool(self._matcher.consume_tokens(self._followed.tolist()))

    def _follow(self, token_id: int) -> None:
        if token_id < 0:
            self._error = "no token could be sampled"  # the step's result says why
        self._num_outputs += 1
        if self._error or self._has_stopped or self._matcher is None:
            return
        if token_id in self._sampling.stop_token_ids:
            self._has_stopped = True
        elif self._matcher.consume_token(token_id) or (self._renew() and self._matcher.consume_token(token_id)):
            self._followed.append(token_id)
        else:
            self._error = (
                f"the grammar does not allow token {token_id}, the {self._num_outputs}th of the output: "
                "the request's other parameters left no other token"
            )


def _bits(token_ids: Iterable[int], num_words: int, num_tokens: int) -> Words:
    """int32[W] with the bits of these tokens set."""
    words = np.zeros(num_words, dtype=np.uint32)
    for token_id in token_ids:
        if token_id < num_tokens:
            words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return words.view(np.int32)
