"""Chooses engines in turn, whatever their load."""

from collections.abc import Sequence
from random import Random

from penstock.frontend.engine.router.engine import Engine
from penstock.frontend.engine.router.policy import Choice
from penstock.frontend.engine.router.prompt import Prompt


class RoundRobin:
    """Chooses each engine in turn; a frontend begins at a random one."""

    uses_cache = False

    def __init__(self, rng: Random) -> None:
        self._turn = rng.randrange(1 << 16)

    def choose(self, prompt: Prompt, engines: Sequence[Engine]) -> Choice:
        self._turn += 1
        return Choice(engines[self._turn % len(engines)], "turn")
