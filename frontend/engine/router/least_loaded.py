"""Chooses the less loaded engine, whatever is cached."""

from collections.abc import Sequence
from random import Random

from penstock.frontend.engine.router.engine import Engine
from penstock.frontend.engine.router.policy import Choice, two_of
from penstock.frontend.engine.router.prompt import Prompt


class LeastLoaded:
    """Chooses the less loaded of two random engines."""

    uses_cache = False

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, prompt: Prompt, engines: Sequence[Engine]) -> Choice:
        two = two_of(engines, self._rng)
        best = min(two, key=lambda each: (each.load() + each.num_lacking(prompt.num_tokens), self._rng.random()))
        return Choice(best, "load")
