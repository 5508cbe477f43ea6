"""Chooses the engine that has cached most of the prompt, as long as that pays."""

from collections.abc import Sequence
from random import Random
from statistics import fmean

from penstock.frontend.engine.router.engine import Engine
from penstock.frontend.engine.router.policy import Choice, two_of
from penstock.frontend.engine.router.prompt import Prompt

NEW_TOKEN_COST = 3.0
"""The cost of an uncached prompt token, relative to one that waits at an engine: it takes a page, and what that
page held has to be computed again. With 1, prefixes move with every change of the queues, and in the end each engine
has a bit of everything. With more than 4, a prefix that all requests share stays too long where it was first."""

SHARE_WEIGHT = 4.0
"""An engine that recently computed a fraction x more than the mean has its load multiplied by 1 + SHARE_WEIGHT * x."""


class PrefixAffinity:
    """Chooses the least cost, in tokens: what is left to compute of the prompt, plus the engine's other work.

    So a conversation stays where its prefix is until that engine's additional load exceeds what the prefix saves. The
    prompt is then computed at another engine, and both have the prefix from then on: a hot prefix spreads as far as it
    must. Loads alone would leave an engine with the busier prefixes a little busier for ever, so the load of an engine
    that has computed more than others weighs more. An idle engine has no load, whatever it has computed before.
    Two random engines are compared, and those with most of the prompt.
    """

    uses_cache = True

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, prompt: Prompt, engines: Sequence[Engine]) -> Choice:
        found = {engine: engine.find(prompt) for engine in engines}
        saved = {engine: engine.num_saved(found[engine]) for engine in engines}
        most = max(saved.values())
        usual = fmean(engine.recent() for engine in engines)
        compared = {*two_of(engines, self._rng), *(engine for engine in engines if most and saved[engine] == most)}
        costs = [
            # Ties are broken at random. Other costs of a request, such as weights to be loaded, would be more terms.
            (self._new(engine, prompt, saved[engine]) + self._load(engine, usual), self._rng.random(), engine)
            for engine in compared
        ]
        best = min(costs, key=lambda each: each[:2])[2]
        reason = "new" if not most else "prefix" if saved[best] == most else "load"
        return Choice(best, reason, sum(found[best]) * best.cached.page_size)

    @staticmethod
    def _new(engine: Engine, prompt: Prompt, num_saved: float) -> float:
        """The cost of what is left to compute of a prompt, and of the pages that must come free first."""
        num_left = prompt.num_tokens - num_saved
        return NEW_TOKEN_COST * num_left + engine.num_lacking(num_left)

    @staticmethod
    def _load(engine: Engine, usual: float) -> float:
        """The cost of the engine's other work; `usual` is what engines have recently computed on average."""
        return engine.load() * (1.0 + SHARE_WEIGHT * max(0.0, engine.recent() / usual - 1.0))
