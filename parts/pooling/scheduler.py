"""Texts that become vectors, beside streams: they lengthen a step a little, so that streams hardly notice them."""

from math import inf
from typing import TYPE_CHECKING, Self

from penstock.core.scheduling.part import SchedulerPart
from penstock.core.sequences.sequence import Request

if TYPE_CHECKING:
    from penstock.core.scheduling.scheduler import Scheduler

_SHARE = 1.2
"""How many times as long as its decodes alone a step may take for such texts."""


class TextsBesideStreams(SchedulerPart):
    """Bounds steps in which all prompts pool. Other prompts may take the usual time."""

    __slots__ = ("_pooling", "_scheduler")

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self._pooling: set[Request] = set()

    @classmethod
    def of(cls, scheduler: "Scheduler", before: Self | None) -> Self | None:
        if scheduler.limits.texts_are_whole:  # nothing else is computed
            return None
        part = cls(scheduler)
        if before is not None:
            part._pooling = before._pooling
        return part

    def arrived(self, request: Request) -> None:
        if request.sampling.pooling is not None:
            self._pooling.add(request)

    def waits(self, request: Request) -> None:
        self.arrived(request)

    def leave(self, request: Request) -> None:
        self._pooling.discard(request)

    @property
    def longest_step_us(self) -> float:
        if not self._pooling:
            return inf
        scheduler = self._scheduler
        running, head = scheduler.running, scheduler.waiting.head()
        if head is not None and head.request not in self._pooling:
            return inf
        if not scheduler.pace.is_known or any(seq.request not in self._pooling for seq in running.prefills):
            return inf
        contexts = [seq.num_computed_tokens for seq in running.decodes]
        return _SHARE * scheduler.pace.decodes_us(len(contexts), sum(contexts))


PARTS = (TextsBesideStreams,)
