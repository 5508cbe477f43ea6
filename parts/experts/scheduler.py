"""How many tokens each expert has computed where experts are spread over ranks: finds hot experts and busy ranks."""

from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from penstock.core.engine.part import EnginePart
from penstock.core.scheduling.answers import Answers
from penstock.ipc.messages import ExpertLoad, LayerLoad, WorkerHello
from penstock.parts.experts.messages import ExpertTokens

if TYPE_CHECKING:
    from penstock.core.engine.loop import Engine

_TELL_SECONDS = 5.0
"""Least time between two messages to the frontends: they carry a number for each expert of each layer."""

_WINDOW_SECONDS = 60.0
"""Time over which imbalance is measured: counts are halved every half of it."""


class ExpertCounts:
    """Adds up the counts that ranks report. They outlive workers."""

    def __init__(self, num_ranks: int) -> None:
        """`num_ranks`: ranks of a stage. A rank whose experts got no token of a layer does not report that layer."""
        self._num_ranks = num_ranks
        self.tokens_of_ranks: dict[str, int] = {}
        """Rank -> tokens that its experts have computed, summed over layers."""
        self._of_experts: dict[int, list[int]] = {}  # layer -> tokens of each expert
        self._recent: dict[int, Counter[int]] = {}  # layer -> rank -> tokens of about the last minute
        self._halved_at = 0.0
        self._told_at = 0.0
        self._has_news = False

    def add(self, rank: int, message: ExpertTokens, now: float) -> None:
        """Add a rank's report; ignore experts that do not exist."""
        if now - self._halved_at > _WINDOW_SECONDS / 2:
            self._halved_at = now
            for counts in self._recent.values():
                for each in counts:
                    counts[each] //= 2
        total = 0
        for layer, num_experts, tokens in ((its.layer, its.num_experts, its.tokens) for its in message.layers):
            of_experts = self._of_experts.setdefault(layer, [0] * num_experts)
            of_layer = 0
            for expert, count in tokens.items():
                if 0 <= expert < len(of_experts):
                    of_experts[expert] += count
                    of_layer += count
            self._recent.setdefault(layer, Counter())[rank] += of_layer
            total += of_layer
        self.tokens_of_ranks[str(rank)] = self.tokens_of_ranks.get(str(rank), 0) + total
        self._has_news = True

    def imbalance(self) -> dict[str, float]:
        """Layer -> tokens of the rank with the most, as a multiple of the mean over all ranks of its stage."""
        return {
            str(layer): max(counts.values()) * self._num_ranks / total
            for layer, counts in sorted(self._recent.items())
            if (total := counts.total())
        }

    def news(self, now: float) -> ExpertLoad | None:
        """Return the message for the frontends; None if nothing has changed, or the last one is recent."""
        if not self._has_news or now - self._told_at < _TELL_SECONDS:
            return None
        self._has_news, self._told_at = False, now
        return ExpertLoad(tuple(LayerLoad(layer, tuple(tokens)) for layer, tokens in sorted(self._of_experts.items())))


class Experts(EnginePart):
    """Tells frontends what ranks report, perhaps while other ranks are still missing."""

    answers = ((ExpertTokens, Answers),)

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._counts: ExpertCounts | None = None  # until ranks report some

    @classmethod
    def of(cls, engine: "Engine") -> Self:
        return cls(engine)

    def answered(self, rank: WorkerHello, message: ExpertTokens) -> None:
        if self._counts is None:
            self._counts = ExpertCounts(rank.num_ranks // rank.num_stages)
        self._counts.add(rank.rank, message, monotonic())

    def beat(self, now: float) -> None:
        if self._counts is not None and (load := self._counts.news(now)) is not None:
            self._engine.frontends.tell_all(load)

    def stats(self) -> dict[str, Any]:
        if self._counts is None:
            return {}
        return {"expert_tokens": self._counts.tokens_of_ranks, "expert_imbalance": self._counts.imbalance()}


PARTS = (Experts,)
