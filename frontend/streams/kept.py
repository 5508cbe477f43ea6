"""One stream that outlives its connection: its latest events, in a bounded buffer, and its readers.

    generator ──pump──▶ numbered events ──▶ readers: each from the event that it asks for
                          ▲ bytes           one attached: the client is there; none attached: it has left

An event that was not sent yet is never dropped: when half the buffer is unsent events, the pump waits, and the request
is paused like a slow reader's. Sent events are kept while there is room, because they may not have arrived. A stream
that runs in the background never waits, so a late reader may find its oldest events gone.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import structlog

from penstock.frontend.errors import ApiError, InvalidRequest
from penstock.frontend.exchange.replies import StreamReply

log = structlog.get_logger()


class EventsGone(InvalidRequest, status=410, code="stream_events_gone"):
    """The events after the one named are no longer kept."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of one stream."""

    num_bytes: int = 1 << 20  # of the events that are kept, 3,000 tokens of a chat; the last one whatever its size
    seconds: float = 120.0  # without a reader until the work is ended or, if it has ended, the stream is forgotten


class KeptStream:
    """A stream from the request's arrival until it is forgotten; lives in a running event loop."""

    def __init__(self, stream_id: str, owner: str, bounds: Bounds, *, forget: Callable[["KeptStream"], None]) -> None:
        """`forget` is called once, when the stream is dropped."""
        self.id, self.owner = stream_id, owner
        self.num_bytes = 0  # of the events that are kept
        self.begun = asyncio.Event()  # the stream has begun, or will never begin
        self.headers: dict[str, str] = {}
        self._bounds = bounds
        self._forget = forget
        self._events: dict[int, bytes] = {}
        self._first = 0  # the number of the first event that is kept
        self._next = 0  # the number of the next event
        self._num_sent = 0  # all events before this number were sent to some reader
        self._num_unsent_bytes = 0
        self._num_readers = 0
        self._num_keep_alives = 0
        self._keep_alive = b""
        self._is_done = False
        self._is_background = False
        self._source: StreamReply | None = None
        self._pump: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()  # set, and replaced, by each event
        self._room = asyncio.Event()

    @property
    def is_begun(self) -> bool:
        """Whether the stream has begun."""
        return self._source is not None

    @property
    def is_live(self) -> bool:
        """Whether more events are to come, or there is a reader."""
        return not self._is_done or self._num_readers > 0

    def begin(self, source: StreamReply, ended: Callable[[bool], None]) -> None:
        """Take over a stream. `ended` is called at its end, with whether it ended by itself."""
        self._source, self.headers = source, source.headers
        self._is_background = source.background is not None
        self._pump = asyncio.create_task(self._run(source, ended))
        self.begun.set()
        self._watch()

    def give_up(self) -> None:
        """The stream will never begin."""
        self._is_done = True
        self.begun.set()
        self._forget(self)

    def stop(self, error: ApiError) -> None:
        """End the work with an error, which current readers get; the stream cannot be continued any more."""
        self._stop_timer()
        self._forget(self)
        if self._source is not None and not self._is_done:
            self._is_background = True  # the pump must not wait for readers
            self._room.set()
            self._source.fail(error)

    def reader(self, after: int = -1) -> StreamReply:
        """The events after number `after`, including those still to come.

        Raises:
            EventsGone: some of them are no longer kept.
        """
        if after + 1 < self._first:
            raise EventsGone(
                f"the events up to {self._first - 1} are no longer kept; continue after one of {self._first - 1} or "
                "more, or ask again"
            )
        is_left = False

        def leave() -> None:
            nonlocal is_left
            if not is_left:
                is_left = True
                self._num_readers -= 1
                self._watch()

        self._num_readers += 1
        self._watch()
        return StreamReply(self._read(after + 1), close=leave, headers=dict(self.headers))

    def drop(self) -> None:
        """End the work at once, and drop the stream's events."""
        self._stop_timer()
        if self._pump is not None and not self._is_done:
            self._pump.cancel()
        elif self._num_readers == 0:
            self._forget(self)

    async def _run(self, source: StreamReply, ended: Callable[[bool], None]) -> None:
        is_complete = False
        mark = b"\n\n" if source.headers.get("Content-Type", "").startswith("text/event-stream") else b"\n"
        try:
            async for piece in source.chunks:
                self._take(piece, mark)
                while self._num_unsent_bytes * 2 > self._bounds.num_bytes and not self._is_background:
                    self._room.clear()
                    await self._room.wait()
            is_complete = True
        except Exception:
            log.exception("stream failed")
        finally:
            source.close()
            with suppress(Exception):
                await source.chunks.aclose()
            self._is_done = True
            self._tell()
            ended(is_complete)
            if is_complete or self._num_readers:
                self._watch()
            else:
                self._forget(self)

    def _take(self, piece: bytes, mark: bytes) -> None:
        for event in _split(piece, mark):
            if event.startswith(b":") or not event.strip():
                self._keep_alive = event
                self._num_keep_alives += 1
                continue
            if mark == b"\n\n":
                event = b"id: %d\n" % self._next + event
            self._events[self._next] = event
            self._next += 1
            self.num_bytes += len(event)
            self._num_unsent_bytes += len(event)
            while self.num_bytes > self._bounds.num_bytes and self._first < self._next - 1:
                if self._first >= self._num_sent and not self._is_background:
                    break
                self._drop_first()
        self._tell()

    def _drop_first(self) -> None:
        size = len(self._events.pop(self._first))
        self.num_bytes -= size
        self._first += 1
        if self._first > self._num_sent:
            self._num_sent = self._first
            self._num_unsent_bytes -= size

    async def _read(self, position: int) -> AsyncGenerator[bytes, None]:
        heard = self._num_keep_alives
        while True:
            if position < self._first:  # the reader is slower than a background stream
                return
            if position < self._next:
                begin, position = position, self._next
                yield b"".join(self._events[number] for number in range(begin, position))
                self._note_sent(position)
            elif self._is_done:
                return
            elif heard != self._num_keep_alives:
                heard = self._num_keep_alives
                yield self._keep_alive
            else:
                await self._news.wait()

    def _note_sent(self, position: int) -> None:
        """All events before this number have been written to some connection."""
        while self._num_sent < position:
            self._num_unsent_bytes -= len(self._events[self._num_sent])
            self._num_sent += 1
        self._room.set()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _watch(self) -> None:
        """Start the timer while there is no reader."""
        self._stop_timer()
        if self._num_readers == 0 and (self._is_done or not self._is_background):
            self._timer = asyncio.get_running_loop().call_later(self._bounds.seconds, self.drop)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _split(piece: bytes, mark: bytes) -> Iterator[bytes]:
    begin = 0
    while begin < len(piece):
        end = piece.find(mark, begin)
        end = len(piece) if end < 0 else end + len(mark)
        yield piece[begin:end]
        begin = end
