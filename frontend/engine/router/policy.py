"""What a way of choosing engines is given, and what it says."""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple, Protocol

from penstock.frontend.engine.router.engine import Engine
from penstock.frontend.engine.router.prompt import Prompt


class Choice(NamedTuple):
    """An engine, and why."""

    engine: Engine
    reason: str  # a word or two, for the metrics
    num_expected: int = 0  # tokens of the prompt that should be cached there


class Policy(Protocol):
    """One way of choosing."""

    uses_cache: bool
    """Whether engines have to tell what they have cached."""

    def choose(self, prompt: Prompt, engines: Sequence[Engine]) -> Choice:
        """Choose one of these, which are ready; there is at least one. It must return at once."""


def two_of(engines: Sequence[Engine], rng: Random) -> Sequence[Engine]:
    """Return two of them at random, or all if there are no more.

    The better of two random choices is nearly as good as the best of all, and frontends that all know the same old
    figures do not all choose the same one (Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 1996).
    """
    return rng.sample(engines, 2) if len(engines) > 2 else engines
