"""Batches that run one after the other: who belongs to the one that runs, and when the next one begins.

A batch has whole requests, and runs until the last of them has ended. Its members come first in the queue (they are
on levels of their own), so a preempted one, a sibling that waited for its prompt, or all of them after a worker's death
return to their batch; nobody else is admitted meanwhile. A request that is paused keeps its place in its batch, but the
batch does not wait for it. With continuous batching there are no batches, and none of this runs.
"""

from collections.abc import Iterable
from math import inf

from penstock.core.batching.static import Static
from penstock.core.sequences.sequence import Key, Request
from penstock.core.sequences.waiting_queue import WaitingQueue

RUNS, FILLS = "another batch is running", "its batch is not full"
"""Why a request that belongs to no batch waits."""

_INSIDE: Key = (0,)
_OUTSIDE: Key = (1,)


class Batches:
    """The batch of one scheduler. Requests that have ended must `leave`."""

    __slots__ = ("_max_size", "_members", "_waiting", "kind", "on_finished", "wakes_at")

    def __init__(self, kind: Static, waiting: WaitingQueue, max_size: int) -> None:
        """`max_size`: most sequences of a batch, if there are as many rows; 0: as many as there are rows."""
        self.kind = kind
        self.on_finished = kind.on_finished
        self._waiting = waiting
        self._max_size = max_size
        self._members: dict[Request, None] = {}
        self.wakes_at = inf
        """When the next batch begins, if it waits for that time alone."""

    def arrived(self, request: Request) -> None:
        """Give a new request its rank, before it has a key."""
        request.rank = request.level = _OUTSIDE + request.rank

    def leave(self, request: Request) -> None:
        """A request has ended."""
        self._members.pop(request, None)

    def why_not(self, request: Request) -> str:
        """Return why a waiting request is not to be admitted now; empty if it may be."""
        if request in self._members:
            return ""
        return RUNS if self._members else FILLS

    def begin(self, requests: Iterable[Request], num_rows: int, now: float) -> bool:
        """Let the next batch begin if the last one has ended, and its time has come; return whether it did.

        `requests` are all that live, in the order of their arrivals.
        """
        self.wakes_at = inf
        if any(not member.is_paused for member in self._members):
            return False
        self._members.clear()
        waiting = self._waiting
        if not waiting.num_seqs:
            return False
        size = min(self._max_size or num_rows, num_rows)
        oldest = next(request.arrived for request in requests if not request.is_paused)
        begins_at = self.kind.begins_at(waiting.num_seqs, size, oldest)
        if now < begins_at:
            self.wakes_at = begins_at
            return False
        in_order = dict.fromkeys(seq.request for seq in waiting.first(waiting.num_seqs))
        self._members = dict.fromkeys(self.kind.choose(in_order, size))
        levels: dict[Request, Key] = {}
        for request in requests:
            rank = _INSIDE if request in self._members else _OUTSIDE
            request.rank = rank + request.rank[1:]
            levels[request] = rank + request.level[1:]
        waiting.change_levels(levels)
        return True
