"""Background work (`Request.is_background`), which no client waits for, beside requests that clients wait for.

It queues behind all other requests (`BACKGROUND`), and is the first to yield rows and pages to them. Beside them it
computes only as much as lengthens a step a little, so that streams hardly notice it. When no other request has a row,
it computes like any other request. Its waiting time is not bounded here; its owner has a bound (a batch's window).
"""

from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Self

from penstock.core.scheduling.part import SchedulerPart
from penstock.core.sequences.intake import Refusal
from penstock.core.sequences.sequence import Key, Request
from penstock.core.steps.prefill_pace import Room

if TYPE_CHECKING:
    from penstock.core.scheduling.scheduler import Scheduler

BACKGROUND: Key = (inf,)
"""Begins the level of background requests: behind all others, whose level begins with a finite number or is empty."""

OTHERS = "others are served first"
"""Why background work waits beside others."""

_PART = 0.1
"""By what part background work may lengthen a step of other requests."""

_UNKNOWN = 8
"""Background rows beside others if a row was measured to cost nothing."""

_is_background = attrgetter("is_background")


class Background(SchedulerPart):
    """Says what of one worker's steps background work may have."""

    __slots__ = ("_pace", "_running", "_waiting", "left_us")

    def __init__(self, scheduler: "Scheduler") -> None:
        self._running = scheduler.running
        self._waiting = scheduler.waiting
        self._pace = scheduler.pace
        self.left_us: float | None = None
        """Microseconds for background prompts in the step that is being planned; None: nothing holds them back."""

    @classmethod
    def of(cls, scheduler: "Scheduler", before: Self | None) -> Self:
        return cls(scheduler)

    def arriving(self, request: Request, now: float) -> Refusal | None:
        """Put a request, which has no key yet, behind all others."""
        if request.is_background:
            request.gives_way = "work in the background"
            request.base_level = request.level = BACKGROUND
            self._pace.learn()  # beside others it gets time that must be known
        return None

    def planning(self) -> None:
        """Hold back the decodes for which a step has no time, and note how much is left for prompts."""
        running = self._running
        if not (running.giving_way or (self._waiting.num_seqs and self._is_next)) or not self._has_others:
            if self.left_us is not None:
                self.left_us = None
                running.hold_back([])
        elif not self._pace.is_known:
            self.left_us = 0.0
            running.hold_back([*running.giving_way])
        else:
            self._divide_step()

    def _divide_step(self) -> None:
        running, pace = self._running, self._pace
        others = [seq.num_computed_tokens for seq in running.decodes if not seq.request.is_background]
        left_us = _PART * pace.decodes_us(len(others), sum(others))
        _, row_us, token_us, _, _ = pace.step_time.rates
        num_rows = 0
        for seq in running.giving_way:
            seq_us = row_us + token_us * seq.num_computed_tokens
            if seq_us > left_us or (not row_us and num_rows >= _UNKNOWN):
                break
            left_us -= seq_us
            num_rows += 1
        self.left_us = left_us
        running.hold_back([*running.giving_way][num_rows:])

    def divide(self, room: Room) -> None:
        if self.left_us is not None:
            room.limit(_is_background, Room(room.num_tokens, self.left_us, self._pace))

    def why_not(self, request: Request, room: Room) -> str:
        if not request.is_background or room.tokens_from(0) <= 0:
            return ""  # there is no room for anybody
        has_none = self._has_others if self.left_us is None else room.tokens_for(request, 0) <= 0
        return OTHERS if has_none else ""

    @property
    def _is_next(self) -> bool:
        """Whether the head of the queue is background work."""
        head = self._waiting.head()
        return head is not None and head.request.is_background

    @property
    def _has_others(self) -> bool:
        """Whether a client waits for some running sequence."""
        return len(self._running) > len(self._running.giving_way)


PARTS = (Background,)
