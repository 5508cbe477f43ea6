"""Static batches, run one after the other: which requests the running batch has, and when the next one begins.

A batch consists of whole requests, and runs until the last of them has ended. Its members come first in the queue (they
are on levels of their own), so they return to their batch after a preemption, after waiting for a sibling's prompt, or
after a worker's death. No other request is admitted meanwhile. A paused request keeps its place in its batch, but the
batch does not wait for it. With continuous batching there is none of this.
"""

from math import inf
from typing import TYPE_CHECKING, Self

from penstock.core.scheduling.part import SchedulerPart
from penstock.core.sequences.intake import Refusal
from penstock.core.sequences.sequence import Key, Request
from penstock.core.steps.prefill_pace import Room
from penstock.parts.batching.options import BatchingOptions
from penstock.parts.batching.scheduler.registry import make_batching
from penstock.parts.batching.scheduler.static import Static

if TYPE_CHECKING:
    from penstock.core.scheduling.scheduler import Scheduler

RUNS, FILLS = "another batch is running", "its batch is not full"
"""Why a request that has no batch yet waits."""

_INSIDE: Key = (0,)
_OUTSIDE: Key = (1,)


class Batches(SchedulerPart):
    """The batch of one scheduler. It survives workers."""

    __slots__ = ("_begins_at", "_kv", "_members", "_num_rows", "_requests", "_waiting", "kind")

    @classmethod
    def of(cls, scheduler: "Scheduler", before: Self | None) -> Self | None:
        kind = make_batching(scheduler.config.of(BatchingOptions))
        if kind is None:
            return None
        batches = before or cls(kind, scheduler)
        batches._follow(scheduler)
        return batches

    def __init__(self, kind: Static, scheduler: "Scheduler") -> None:
        self.kind = kind
        self._waiting = scheduler.waiting
        self._requests = scheduler.requests  # all live ones, in order of arrival
        self._members: dict[Request, None] = {}
        self._begins_at = inf  # the next batch, if it waits for nothing but that time

    def _follow(self, scheduler: "Scheduler") -> None:
        """Another worker has come."""
        self._kv = scheduler.kv
        self._num_rows = scheduler.limits.max_num_seqs

    @property
    def wakes_at(self) -> float:
        return self._begins_at

    def arriving(self, request: Request, now: float) -> Refusal | None:
        """Put a new request, which may have a key already, behind the running batch."""
        request.base_level = _OUTSIDE + request.base_level
        request.level = _OUTSIDE + request.level
        return None

    def finished(self, request: Request, num_outputs: int) -> None:
        self.kind.on_finished(request, num_outputs)

    def leave(self, request: Request) -> None:
        if not request.is_live:
            self._members.pop(request, None)

    def why_not(self, request: Request, room: Room) -> str:
        if request in self._members:
            return ""
        return RUNS if self._members else FILLS

    def advance(self, *, is_idle: bool) -> tuple[()]:
        """Begin the next batch, with at most as many sequences as rows, if the last one has ended and it is time."""
        self._begins_at = inf
        if any(not member.is_paused for member in self._members):
            return ()
        self._members.clear()
        waiting, requests = self._waiting, self._requests.values()
        if not waiting.num_seqs:
            return ()
        oldest = next(request.arrived for request in requests if not request.is_paused)
        begins_at = self.kind.begins_at(waiting.num_seqs, self._num_rows, oldest)
        if self._kv.now < begins_at:
            self._begins_at = begins_at
            return ()
        in_order = dict.fromkeys(seq.request for seq in waiting.first(waiting.num_seqs))
        self._members = dict.fromkeys(self.kind.choose(in_order, self._num_rows))
        levels: dict[Request, Key] = {}
        for request in requests:
            first = _INSIDE if request in self._members else _OUTSIDE
            request.base_level = first + request.base_level[1:]
            levels[request] = first + request.level[1:]
        waiting.change_levels(levels)
        waiting.note_new_order()
        return ()
