"""What a routing policy is given, and what it returns."""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple, Protocol

from penstock.frontend.engine.router.engine import Engine
from penstock.frontend.engine.router.prompt import Prompt


class Choice(NamedTuple):
    """An engine, and why."""

    engine: Engine
    reason: str  # a word or two, for the metrics
    num_expected: int = 0  # prompt tokens that should be cached at the engine


class Policy(Protocol):
    """One routing policy."""

    uses_cache: bool
    """Whether engines have to report what they have cached."""

    def choose(self, prompt: Prompt, engines: Sequence[Engine]) -> Choice:
        """Choose one of `engines`, at least one, all ready. Must return at once."""


def two_of(engines: Sequence[Engine], rng: Random) -> Sequence[Engine]:
    """Return two random engines, or all if there are no more than two.

    The better of two random choices is nearly as good as the best of all. It also keeps frontends with the same old
    figures from all choosing the same engine (Mitzenmacher, The Power of Two Choices in Randomized Load Balancing,
    1996).
    """
    return rng.sample(engines, 2) if len(engines) > 2 else engines
