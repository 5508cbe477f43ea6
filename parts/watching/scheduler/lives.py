"""The lives of requests: the events of each, and why it waited at each moment. All sizes are bounded.

    arrived -- waited, waited, ... -- admitted -- chunk, chunk, ... -- first token ---- finished
                 ^ why                    `-- preempted -- waited ... admitted again --'

Reasons are sampled several times a second; each holds until another one is seen, so there are no gaps.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

from penstock.core.scheduling.step_record import IN_LINE, JUST_CAME
from penstock.parts.watching.messages import RequestLife, SequenceEvent, Waiting

MAX_REQUESTS, MAX_FIRST_EVENTS, MAX_LAST_EVENTS, MAX_WAITS = 512, 64, 192, 8192

SOON = 0.5
"""Seconds: a shorter wait without a sampled reason is shown as having just come."""

_Name = tuple[str, int]  # a sequence's request id and index


class Life:
    """The events of one request: the first and the last ones."""

    __slots__ = ("_first", "_last", "is_live", "is_watched", "num_left_out")

    def __init__(self, *, is_watched: bool) -> None:
        self._first: list[SequenceEvent] = []
        self._last: deque[SequenceEvent] = deque()
        self.num_left_out = 0
        self.is_live = True
        self.is_watched = is_watched  # from its arrival on

    def add(self, event: SequenceEvent) -> None:
        """Add the next event."""
        if len(self._first) < MAX_FIRST_EVENTS:
            self._first.append(event)
            return
        self._last.append(event)
        if len(self._last) > MAX_LAST_EVENTS:
            self._last.popleft()
            self.num_left_out += 1

    def events(self) -> list[SequenceEvent]:
        """Return all kept events, in order."""
        return [*self._first, *self._last]


class _Wait(NamedTuple):
    since: float
    reason: str  # empty: not sampled yet


class Lives:
    """The lives of the latest requests."""

    def __init__(self) -> None:
        self._lives: OrderedDict[str, Life] = OrderedDict()  # oldest first
        self._waits: dict[_Name, _Wait] = {}  # current waits

    def begin(self, arrived: SequenceEvent, waiting: Iterable[int], *, is_watched: bool = True) -> None:
        """A request has arrived, with its first event. `waiting`: the indices of its waiting sequences."""
        request_id = arrived.request_id
        life = self._lives[request_id] = Life(is_watched=is_watched)
        self._lives.move_to_end(request_id)
        life.add(arrived)
        for idx in waiting:
            self._wait((request_id, idx), arrived.at)
        while len(self._lives) > MAX_REQUESTS:
            self._drop_one()

    def add(self, event: SequenceEvent) -> SequenceEvent | None:
        """Add an event; return the wait that it has ended, if any."""
        life = self._lives.get(event.request_id)
        if life is None:
            return None
        name = (event.request_id, event.sequence_idx)
        waited = None
        if event.kind in ("admitted", "finished", "paused"):
            wait = self._waits.pop(name, None)
            if wait is not None and event.at > wait.since:
                waited = _waited(name, wait, event.at)
                life.add(waited)
        life.add(event)
        if event.kind in ("preempted", "resumed"):
            self._wait(name, event.at)
        return waited

    def end(self, request_id: str) -> None:
        """A request has ended; it is remembered for a while."""
        if (life := self._lives.get(request_id)) is not None:
            life.is_live = False

    def looked(self, waiting: Iterable[Waiting], now: float) -> list[SequenceEvent]:
        """Set the sequences' current reasons to wait; return the waits for other reasons that have thereby ended."""
        ended: list[SequenceEvent] = []
        for each in waiting:
            name = (each.request_id, each.sequence_idx)
            wait = self._waits.get(name)
            if wait is None:
                continue
            since = wait.since
            if wait.reason and _kind(wait.reason) != _kind(each.reason):
                ended.append(_waited(name, wait, now))
                if (life := self._lives.get(each.request_id)) is not None:
                    life.add(ended[-1])
                since = now
            self._waits[name] = _Wait(since, each.reason)
        return ended

    def tell(self, number: int, wanted: str, now: float, unix_time: float) -> RequestLife:
        """Return the life of the latest request whose id contains `wanted`."""
        request_id = next((each for each in reversed(self._lives) if wanted in each), "")
        if not request_id:
            return RequestLife(number, now, unix_time, "", (), 0, False, False)
        life = self._lives[request_id]
        open_waits = [
            _waited(name, wait, now)
            for idx in range(life.events()[0].more)
            if (wait := self._waits.get(name := (request_id, idx))) is not None
        ]
        events = (*life.events(), *open_waits)
        what = number, now, unix_time, request_id, events, life.num_left_out, life.is_live, life.is_watched
        return RequestLife(*what)

    def _wait(self, name: _Name, since: float) -> None:
        if len(self._waits) < MAX_WAITS:
            self._waits[name] = _Wait(since, "")

    def _drop_one(self) -> None:
        """Drop the oldest request that has ended; if all live, the oldest."""
        request_id = next((each for each, life in self._lives.items() if not life.is_live), next(iter(self._lives)))
        life = self._lives.pop(request_id)
        for idx in range(life.events()[0].more):
            self._waits.pop((request_id, idx), None)


def _kind(reason: str) -> str:
    return reason.partition(":")[0]


def _waited(name: _Name, wait: _Wait, until: float) -> SequenceEvent:
    reason = wait.reason or (JUST_CAME if until - wait.since < SOON else IN_LINE)
    return SequenceEvent(wait.since, "waited", *name, text=reason, until=until)
