"""Where most of the prompt is cached, as long as that pays."""

from collections.abc import Sequence
from random import Random
from statistics import fmean

from penstock.frontend.engine.router.engine import Engine
from penstock.frontend.engine.router.policy import Choice, two_of
from penstock.frontend.engine.router.prompt import Prompt

NEW_TOKEN_COST = 3.0
"""What a token that is not cached costs, of what one costs that waits there: it takes a page, whose content is evicted
and has to be computed again. With 1 prefixes move at every whim of the queues, and each engine has a bit of all in the
end; with more than 4 a prefix that all requests have in common stays too long where it was first."""

SHARE_WEIGHT = 4.0
"""How much more an engine's load weighs for each part of the others' mean that it has computed beyond its share."""


class PrefixAffinity:
    """The least cost, in tokens: what is left to compute of the prompt, and what else that engine has to do.

    So a conversation stays where its prefix is until more waits there, beyond what waits elsewhere, than the prefix
    saves. It is then computed elsewhere, and is found at both from then on: a hot prefix spreads as far as it must.
    Loads alone would leave an engine that happens to have the busier prefixes a little busier for ever; so the load of
    one that has computed more than others weighs more. An idle engine has none, whatever it has done.
    Compared are two engines at random, and the one with most of the prompt.
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
            # Equal costs are drawn. Whatever else a request needs, as weights that are not loaded, is one more term.
            (self._new(engine, prompt, saved[engine]) + self._load(engine, usual), self._rng.random(), engine)
            for engine in compared
        ]
        best = min(costs, key=lambda each: each[:2])[2]
        reason = "new" if not most else "prefix" if saved[best] == most else "load"
        return Choice(best, reason, sum(found[best]) * best.cached.page_size)

    @staticmethod
    def _new(engine: Engine, prompt: Prompt, num_saved: float) -> float:
        """What is to be computed of a prompt, and whose pages must come free first."""
        num_left = prompt.num_tokens - num_saved
        return NEW_TOKEN_COST * num_left + engine.num_lacking(num_left)

    @staticmethod
    def _load(engine: Engine, usual: float) -> float:
        """What else there is to do, where engines have usually computed so much of late."""
        return engine.load() * (1.0 + SHARE_WEIGHT * max(0.0, engine.recent() / usual - 1.0))
