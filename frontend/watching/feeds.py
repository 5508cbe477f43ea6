"""The clients that watch engines. Each engine is asked once for all clients, for as long as there are any.

engine ──WatchedSteps──▶ StepFeed ──one text for all──▶ Watch, Watch, ...
       ◀─WatchSteps, every few seconds─┘                  └ drops its oldest if its client is slow
"""

import asyncio
from collections import deque
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

import msgspec

from penstock.frontend.engine.link import EngineLink
from penstock.frontend.errors import Unavailable
from penstock.frontend.exchange import sse
from penstock.frontend.watching.told import StepReader
from penstock.ipc.messages import WatchedSteps, WatchSteps

LEASE, RENEWAL = 10.0, 3.0
"""Seconds for which an engine goes on without being asked again, and after which it is asked again."""

MAX_WATCHES = 64
"""Limit for the clients of one engine in one process."""

MAX_KEPT = 25
"""Messages kept for a client that reads slowly: five seconds' worth."""


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
        self._link.on_steps = self._on_steps
        self._link.send(WatchSteps(LEASE))
        if self._renewal is None:
            self._renewal = asyncio.create_task(self._renew())

    def remove(self, watch: Watch) -> None:
        """Remove a client; without clients the feed ends."""
        if self._watches.pop(watch, 0) is None and not self._watches:
            self._link.on_steps = None
            self._link.send(WatchSteps(0))
            if self._renewal is not None:
                self._renewal.cancel()
                self._renewal = None

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL)
            self._link.send(WatchSteps(LEASE))

    def _on_steps(self, message: WatchedSteps) -> None:
        text = self._encoder.encode(self._reader.read(message, self._engine))
        event = sse.named_event("steps", text)
        for watch in self._watches:
            watch.put(event)


_feeds: WeakKeyDictionary[EngineLink, StepFeed] = WeakKeyDictionary()


def feed_of(link: EngineLink, engine: str) -> StepFeed:
    """The one feed of an engine's link."""
    feed = _feeds.get(link)
    if feed is None:
        feed = _feeds[link] = StepFeed(link, engine)
    return feed
