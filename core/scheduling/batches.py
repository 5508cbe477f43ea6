"""Static batches, run one after the other: which requests the running batch has, and when the next one begins.

A batch consists of whole requests, and runs until the last of them has ended. Its members come first in the queue (they
are on levels of their own), so they return to their batch after a preemption, after waiting for a sibling's prompt, or
after a worker's death. No other request is admitted meanwhile. A paused request keeps its place in its batch, but the
batch does not wait for it. This code does not run with continuous batching.
"""

from collections.abc import Iterable
from math import inf

from penstock.core.batching.static import Static
from penstock.core.sequences.sequence import Key, Request
from penstock.core.sequences.waiting_queue import WaitingQueue

RUNS, FILLS = "another batch is running", "its batch is not full"
"""Why a request that has no batch yet waits."""

_INSIDE: Key = (0,)
_OUTSIDE: Key = (1,)


class Batches:
    """The batch of one scheduler. Requests that have ended must `leave`."""

    __slots__ = ("_members", "_waiting", "kind", "on_finished", "wakes_at")

    def __init__(self, kind: Static, waiting: WaitingQueue) -> None:
        self.kind = kind
        self.on_finished = kind.on_finished
        self._waiting = waiting
        self._members: dict[Request, None] = {}
        self.wakes_at = inf
        """When the next batch begins, if it waits for nothing but that time."""

    def arrived(self, request: Request) -> None:
        """Give a new request its base level, before it has a key."""
        request.base_level = request.level = _OUTSIDE + request.base_level

    def leave(self, request: Request) -> None:
        """A request has ended."""
        self._members.pop(request, None)

    def why_not(self, request: Request) -> str:
        """Return why a waiting request may not be admitted now; empty if it may."""
        if request in self._members:
            return ""
        return RUNS if self._members else FILLS

    def begin(self, requests: Iterable[Request], num_rows: int, now: float) -> bool:
        """Begin the next batch if the last one has ended and it is time; return whether it began.

        A batch has at most as many sequences as there are rows. `requests`: all live ones, in order of arrival.
        """
        self.wakes_at = inf
        if any(not member.is_paused for member in self._members):
            return False
        self._members.clear()
        waiting = self._waiting
        if not waiting.num_seqs:
            return False
        oldest = next(request.arrived for request in requests if not request.is_paused)
        begins_at = self.kind.begins_at(waiting.num_seqs, num_rows, oldest)
        if now < begins_at:
            self.wakes_at = begins_at
            return False
        in_order = dict.fromkeys(seq.request for seq in waiting.first(waiting.num_seqs))
        self._members = dict.fromkeys(self.kind.choose(in_order, num_rows))
        levels: dict[Request, Key] = {}
        for request in requests:
            first = _INSIDE if request in self._members else _OUTSIDE
            request.base_level = first + request.base_level[1:]
            levels[request] = first + request.level[1:]
        waiting.change_levels(levels)
        return True
