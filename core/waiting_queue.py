"""Sequences that wait, in policy order, with work per step that does not grow with their number."""

from bisect import insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice
from operator import attrgetter

from penstock.core.sequence import Request, Sequence

_by_idx = attrgetter("sequence_idx")


class WaitingQueue:
    """A heap of requests (by `order`) that have waiting sequences (by `sequence_idx`).

    A request whose sequences wait for a sibling to compute their common prompt is parked beside the
    heap, so that it does not hold up those behind it; so is one that must wait until it is known who ended a worker.
    A request whose grammar is not ready is held, until it is released.
    A request whose client does not read is paused: it counts as waiting no more until it may proceed.
    Entries of requests that have nothing waiting
    any more, or are paused, are dropped when they reach the top, or all at once when they are the majority.
    """

    __slots__ = ("_heap", "_held", "_num_stale", "_parked", "_paused", "num_seqs", "num_tokens")

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._num_stale = 0
        self._parked: dict[Request, None] = {}
        self._held: dict[Request, None] = {}  # as parked, but somebody says when it is over
        self._paused: dict[Request, None] = {}
        self.num_seqs = 0
        self.num_tokens = 0  # known ones, prompts and outputs, of each sequence that waits

    def add_request(self, request: Request) -> None:
        """Queue a new request with all its sequences."""
        self.num_seqs += len(request.waiting)
        self.num_tokens += sum(seq.num_tokens for seq in request.waiting)
        self._enqueue(request)

    def put_back(self, seq: Sequence) -> None:
        """Queue a sequence that ran, at its place in the order."""
        request = seq.request
        if request.is_queued and not request.waiting:
            self._num_stale -= 1
        insort(request.waiting, seq, key=_by_idx)
        self.num_seqs += 1
        self.num_tokens += seq.num_tokens
        if not request.is_queued and not request.is_parked:
            self._enqueue(request)

    def head(self) -> Sequence | None:
        """Return the sequence whose turn it is, or None."""
        heap = self._heap
        while heap:
            request = heap[0][1]
            if request.waiting and not request.is_paused:
                return request.waiting[0]
            heappop(heap)
            request.is_queued = False
            self._num_stale -= 1
        return None

    def remove(self, seq: Sequence) -> None:
        """Take a waiting sequence out: it is admitted, aborted or failed."""
        request = seq.request
        request.waiting.remove(seq)
        if request.is_paused:
            if not request.waiting:
                del self._paused[request]
                request.is_paused = False
            return
        self.num_seqs -= 1
        self.num_tokens -= seq.num_tokens
        if request.waiting:
            return
        if request.is_parked:
            self._leave_side(request)
        elif request.is_queued:
            self._add_stale()

    def park(self, request: Request) -> None:
        """Set the request at the head aside."""
        self._set_aside(request)
        self._parked[request] = None

    def parked(self) -> list[Request]:
        """Return the requests set aside: no more than rows, but while suspects of a worker's death are tried."""
        return list(self._parked)

    def unpark(self, request: Request) -> None:
        self._leave_side(request)
        self._enqueue(request)

    def hold(self, request: Request) -> None:
        """Set the request at the head aside until `release`: nobody looks at it in between."""
        self._set_aside(request)
        self._held[request] = None

    def release(self, request: Request) -> bool:
        """Queue a held request again, at its place in the order; whether it was held."""
        if request not in self._held:
            return False
        self.unpark(request)
        return True

    def release_all(self) -> None:
        for request in list(self._held):
            self.unpark(request)

    def is_held(self, request: Request) -> bool:
        return request in self._held

    def held(self) -> list[Request]:
        """Return the requests that wait to be released."""
        return list(self._held)

    def pause(self, request: Request) -> None:
        """Set a request aside, none of whose sequences runs, until `proceed`."""
        request.is_paused = True
        self._paused[request] = None
        self.num_seqs -= len(request.waiting)
        self.num_tokens -= sum(seq.num_tokens for seq in request.waiting)
        if request.is_parked:
            self._leave_side(request)
        elif request.is_queued:
            self._add_stale()

    def proceed(self, request: Request) -> None:
        """Queue a paused request again, at its place in the order."""
        del self._paused[request]
        request.is_paused = False
        self.num_seqs += len(request.waiting)
        self.num_tokens += sum(seq.num_tokens for seq in request.waiting)
        if request.is_queued:
            self._num_stale -= 1
        else:
            self._enqueue(request)

    @property
    def num_paused_requests(self) -> int:
        return len(self._paused)

    def requests(self) -> Iterator[Request]:
        """Yield every request with a waiting sequence, in no order; for resets and checks."""
        yield from (entry[1] for entry in self._heap if entry[1].waiting and not entry[1].is_paused)
        yield from self._parked
        yield from self._held
        yield from self._paused

    def first(self, limit: int) -> list[Sequence]:
        """Return the first waiting sequences in order. O(waiting): only for the step trace."""
        entries = [(request.order, request) for request in self.requests()]
        ordered = (seq for _, request in nsmallest(limit, entries) for seq in request.waiting)
        return list(islice(ordered, limit))

    @property
    def num_entries(self) -> int:
        """Size of the heap, stale entries included; for checks."""
        return len(self._heap)

    def _enqueue(self, request: Request) -> None:
        heappush(self._heap, (request.order, request))
        request.is_queued = True

    def _set_aside(self, request: Request) -> None:
        assert self._heap[0][1] is request
        heappop(self._heap)
        request.is_queued = False
        request.is_parked = True

    def _leave_side(self, request: Request) -> None:
        request.is_parked = False
        del (self._held if request in self._held else self._parked)[request]

    def _add_stale(self) -> None:
        self._num_stale += 1
        if self._num_stale > 32 and self._num_stale * 2 > len(self._heap):
            self._compact()

    def _compact(self) -> None:
        live = []
        for entry in self._heap:
            if entry[1].waiting and not entry[1].is_paused:
                live.append(entry)
            else:
                entry[1].is_queued = False
        heapify(live)
        self._heap = live
        self._num_stale = 0
