"""The clients that watch engines. Each engine is asked once for all clients, for as long as there are any.

engine ──WatchedSteps──▶ StepFeed ──one text for all──▶ Watch, Watch, ...
       ◀─WatchSteps, every few seconds─┘ │                └ drops its oldest if its client is slow
                                         └ the last seconds, for a client that comes later

A client may also ask for the feed to go on for a while without any (`StepFeed.hold`): a page that shows something else
does, so that it can show the scheduler's last seconds at once.
"""

import asyncio
from collections import deque
from itertools import islice
from types import TracebackType
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary

import msgspec

from penstock.frontend.engine.link import EngineLink
from penstock.frontend.errors import Unavailable
from penstock.frontend.exchange import sse
from penstock.parts.watching.frontend.told import StepReader
from penstock.parts.watching.messages import WatchedSteps, WatchSteps

LEASE, RENEWAL = 10.0, 3.0
"""Seconds for which an engine goes on without being asked again, and after which it is asked again."""

MAX_WATCHES = 64
"""Limit for the clients of one engine in one process."""

MAX_KEPT = 25
"""Messages kept for a client that reads slowly: five seconds' worth."""

PAST_SECONDS, MAX_PAST_BYTES = 30, 8 << 20
"""What is kept for clients that come later."""

MAX_HOLD_SECONDS = 120
"""Limit for going on without clients."""


class _Past(NamedTuple):
    at: float  # seconds of the scheduler's clock
    has_picture: bool
    event: bytes


class Watch:
    """One client. Use it as a context manager, which ends the watch."""

    def __init__(self, feed: "StepFeed") -> None:
        self._feed = feed
        self._kept: deque[bytes] = deque(maxlen=MAX_KEPT)
        self._has_news = asyncio.Event()

    def __enter__(self) -> Self:
        self._feed.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._feed.remove(self)

    def put(self, event: bytes) -> None:
        """Queue an event; the oldest one is dropped if there are too many."""
        self._kept.append(event)
        self._has_news.set()

    async def next(self, seconds: float) -> bytes:
        """All queued events; empty if none comes within this many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._has_news.wait()
        except TimeoutError:
            return b""
        self._has_news.clear()
        events = b"".join(self._kept)
        self._kept.clear()
        return events


class StepFeed:
    """All clients that watch one engine."""

    def __init__(self, link: EngineLink, engine: str) -> None:
        self._link = link
        self._engine = engine
        self._watches: dict[Watch, None] = {}
        self._reader = StepReader()
        self._encoder = msgspec.json.Encoder()
        self._renewal: asyncio.Task[None] | None = None
        self._held_until = 0.0  # of the event loop's clock
        self._past: deque[_Past] = deque()
        self._num_past_bytes = 0

    def check(self) -> None:
        """Check that there is room for one more client.

        Raises:
            Unavailable: there are too many.
        """
        if len(self._watches) >= MAX_WATCHES:
            raise Unavailable(f"{MAX_WATCHES} clients watch this engine already", retry_after=5)

    def add(self, watch: Watch) -> None:
        """Add a client, which soon gets a complete picture."""
        self._watches[watch] = None
        self._begin()

    def remove(self, watch: Watch) -> None:
        """Remove a client; without clients the feed ends, unless it is held."""
        if self._watches.pop(watch, 0) is None and not self._is_used():
            self._end()

    def hold(self, seconds: float) -> None:
        """Let the feed go on for so many seconds from now, also without clients."""
        self._held_until = max(self._held_until, asyncio.get_running_loop().time() + seconds)
        self._begin()

    def past(self, seconds: float) -> list[bytes]:
        """The events of the last so many seconds, as far as they are kept. The first one has a complete picture."""
        pictures = [place for place, each in enumerate(self._past) if each.has_picture]
        if not pictures:
            return []
        since = self._past[-1].at - seconds
        first = max((place for place in pictures if self._past[place].at <= since), default=pictures[0])
        return [each.event for each in islice(self._past, first, None)]

    def _begin(self) -> None:
        self._link.listeners[WatchedSteps] = self._on_steps
        self._link.send(WatchSteps(LEASE))
        if self._renewal is None:
            self._renewal = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL)
            if not self._is_used():
                break
            self._link.send(WatchSteps(LEASE))
        self._end()

    def _is_used(self) -> bool:
        return bool(self._watches) or self._held_until > asyncio.get_running_loop().time()

    def _end(self) -> None:
        self._link.listeners.pop(WatchedSteps, None)
        self._link.send(WatchSteps(0))
        self._past.clear()
        self._num_past_bytes = 0
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    def _on_steps(self, message: WatchedSteps) -> None:
        text = self._encoder.encode(self._reader.read(message, self._engine))
        event = sse.named_event("steps", text)
        self._keep(_Past(message.now, message.picture is not None, event))
        for watch in self._watches:
            watch.put(event)

    def _keep(self, event: _Past) -> None:
        past = self._past
        if past and event.at < past[-1].at:
            past.clear()  # another scheduler, with another clock
            self._num_past_bytes = 0
        past.append(event)
        self._num_past_bytes += len(event.event)
        # The picture before the first of these seconds is kept, too: without it, they do not say who has which row.
        while past and (past[0].at < event.at - PAST_SECONDS - 2 * RENEWAL or self._num_past_bytes > MAX_PAST_BYTES):
            self._num_past_bytes -= len(past.popleft().event)


_feeds: WeakKeyDictionary[EngineLink, StepFeed] = WeakKeyDictionary()


def feed_of(link: EngineLink, engine: str) -> StepFeed:
    """The one feed of an engine's link."""
    feed = _feeds.get(link)
    if feed is None:
        feed = _feeds[link] = StepFeed(link, engine)
    return feed
