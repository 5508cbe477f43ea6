"""Tells frontends that choose among engines what this engine's prefix cache holds.

    changes    sent `INTERVAL` after the first of them, at most `MAX_CHANGES` at a time; the same bytes for all
    snapshot   for frontends that are new or have missed something, and for all if the cache was replaced or has too
               many changes to send: `PART_PAGES` every `PART_SECONDS`, with changes in between

Until the first such frontend says hello, no changes are recorded.
"""

import asyncio
from collections.abc import Collection, Iterator
from itertools import count
from typing import TYPE_CHECKING, Protocol, Self

import structlog

from penstock.core.engine.part import EnginePart
from penstock.core.kv.kv_pages import KVPages
from penstock.core.sequences.limits import WorkerLimits
from penstock.ipc.channel import PeerId
from penstock.ipc.messages import CacheEvents, FrontendHello, ListCache, Message
from penstock.parts.routing.scheduler.changes import CacheChanges, Tiered

if TYPE_CHECKING:
    from penstock.core.engine.loop import Engine

log = structlog.get_logger()

INTERVAL = 0.05
"""Seconds: soon enough for the rest of a burst whose first request has just computed the shared prefix."""

MAX_CHANGES, MORE_SECONDS = 4096, 0.005
"""Pages in one message, and seconds until the next one if there are more."""

PART_PAGES, PART_SECONDS = 1024, 0.01
"""A part takes one or two milliseconds. So a million pages take ten seconds, and a tenth of the scheduler's time."""


class Broadcaster(Protocol):
    """Sends a message to several peers (`Router`)."""

    def broadcast(self, peers: Collection[PeerId], message: Message) -> list[PeerId]:
        """Encode the message once; return the peers that do not get it. They notice the gap in its numbers."""


class CacheNews:
    """The readers of one engine's news. Lives in a running event loop."""

    def __init__(self, channel: Broadcaster) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._kv: KVPages | None = None
        self._changes: CacheChanges | None = None
        self._readers: dict[PeerId, None] = {}
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._parts: Iterator[CacheEvents] | None = None  # of the snapshot that is being sent
        self._parts_to: list[PeerId] = []
        self._to_begin: dict[PeerId, None] = {}  # frontends that get the next snapshot

    def add(self, peer: PeerId) -> None:
        """A frontend subscribes."""
        self._readers[peer] = None
        self.tell_all_of_it(peer)

    def remove(self, peer: PeerId) -> None:
        """A frontend is gone."""
        self._readers.pop(peer, None)
        self._to_begin.pop(peer, None)

    def follow(self, kv: KVPages, limits: WorkerLimits) -> None:
        """Set the cache. If it was replaced, everything sent before is void, and all readers get a snapshot."""
        if kv is not self._kv:
            self._kv, self._limits = kv, limits
            self._changes = CacheChanges(kv)
            self._begin_for_all()

    def tell_all_of_it(self, peer: PeerId) -> None:
        """Send a snapshot to a reader that is new or has missed something."""
        if peer in self._readers:
            self._to_begin[peer] = None
            self._begin()

    def changed(self) -> None:
        """The cache may have changed: changes are sent soon."""
        if self._timer is None and self._changes is not None and (self._changes.num_noted or self._must_begin):
            self._timer = self._loop.call_later(INTERVAL, self._tell)

    def close(self) -> None:
        """Stop sending."""
        self._readers.clear()
        self._parts = None
        if self._timer is not None:
            self._timer.cancel()

    @property
    def _must_begin(self) -> bool:
        return self._changes is not None and self._changes.has_overflown

    def _tell(self) -> None:
        self._timer = None
        changes = self._changes
        assert changes is not None
        if self._must_begin:
            log.info("cache event backlog: sending snapshot")
            self._begin_for_all()
        elif changes.num_noted:
            device, host = changes.take(MAX_CHANGES)
            self._number += 1
            self._channel.broadcast(self._readers, CacheEvents(self._number, device, host))
            if changes.num_noted:
                self._timer = self._loop.call_later(MORE_SECONDS, self._tell)

    def _begin_for_all(self) -> None:
        assert self._changes is not None
        self._changes.restart()
        self._parts = None
        self._to_begin = dict(self._readers)
        self._begin()

    def _begin(self) -> None:
        if self._parts is None and self._to_begin and self._changes is not None:
            self._parts_to, self._to_begin = list(self._to_begin), {}
            self._parts = self._snapshot(self._changes)
            self._tell_part(self._parts)

    def _snapshot(self, changes: CacheChanges) -> Iterator[CacheEvents]:
        assert self._kv is not None
        limits, numbers = self._limits, count()
        facts = (self._kv.page_size, limits.longest_usual_prompt, limits.is_each_length_special)
        parts: Iterator[Tiered] = changes.contents(PART_PAGES)
        for device, host in parts:
            yield CacheEvents(self._number, device, host, next(numbers), False, *facts)
        yield CacheEvents(self._number, part=next(numbers), is_last=True)

    def _tell_part(self, parts: Iterator[CacheEvents]) -> None:
        if parts is not self._parts:
            return  # a newer snapshot has begun
        part = next(parts, None)
        if part is None:
            self._parts = None
            self._begin()
            return
        self._channel.broadcast([peer for peer in self._parts_to if peer in self._readers], part)
        self._loop.call_later(PART_SECONDS, self._tell_part, parts)


class Routing(EnginePart):
    """Tells the frontends that want to know what the engine's cache holds."""

    orders = (ListCache,)

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._news: CacheNews | None = None  # until a frontend subscribes

    @classmethod
    def of(cls, engine: "Engine") -> Self:
        return cls(engine)

    def order(self, peer: PeerId, message: ListCache) -> None:
        if self._news is not None:
            self._news.tell_all_of_it(peer)

    def on_frontend(self, peer: PeerId, hello: FrontendHello) -> None:
        if hello.wants_cache_events:
            if self._news is None:
                self._news = CacheNews(self._engine.frontends.channel)
                self.on_new_pages()
            self._news.add(peer)

    def on_frontend_gone(self, peer: PeerId) -> None:
        if self._news is not None:
            self._news.remove(peer)

    def on_new_pages(self) -> None:
        scheduler = self._engine.scheduler
        if self._news is not None and scheduler is not None:
            self._news.follow(scheduler.kv, scheduler.limits)

    def changed(self) -> None:
        if self._news is not None:
            self._news.changed()

    def close(self) -> None:
        if self._news is not None:
            self._news.close()
