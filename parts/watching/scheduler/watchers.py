"""The frontends that watch an engine until their leases expire, and the answers to their questions.

    WatchSteps ──▶ a feed (`parts/watching/scheduler/feed.py`), sent every `INTERVAL` ──last lease over──▶ no feed
    a question ──▶ computed in small parts with pauses ──▶ its answer

What cannot be sent is lost. A frontend is not dropped for that, unlike one that does not read its requests' tokens.
"""

import asyncio
from collections.abc import Callable, Collection, Generator
from time import monotonic, time
from typing import Protocol

from penstock.core.scheduling.scheduler import Scheduler
from penstock.ipc.channel import PeerId
from penstock.ipc.messages import Message
from penstock.parts.watching.messages import Answer, ListPages, Question, ShowLife, WatchSteps
from penstock.parts.watching.scheduler.feed import Feed
from penstock.parts.watching.scheduler.page_map import page_map
from penstock.parts.watching.scheduler.prefix_tree import Clock, prefix_tree

INTERVAL = 0.2
"""Seconds between two messages: people notice no difference to a shorter time. Waiting requests are listed as often."""

_PAUSE = 0.001
"""Seconds between two parts of an answer: a step is planned meanwhile."""

_MAX_ANSWERS = 4
"""Most answers under way at once: further questions get none."""


class Broadcaster(Protocol):
    """Sends a message to several peers (`Router`)."""

    def broadcast(self, peers: Collection[PeerId], message: Message) -> list[PeerId]:
        """Encode the message once; return the peers that do not get it."""


class Watchers:
    """The watching frontends of one engine. Lives in a running event loop; made at the first order or question."""

    def __init__(
        self,
        channel: Broadcaster,
        scheduler: Callable[[], Scheduler | None],
        on_feed: Callable[[Feed | None], None],
    ) -> None:
        """`on_feed` gets the feed that must hear of all events from now on; None: no frontend watches any more."""
        self._channel = channel
        self._scheduler = scheduler
        self._on_feed = on_feed
        self._loop = asyncio.get_running_loop()
        self._leases: dict[PeerId, float] = {}  # until when each watches
        self._feed: Feed | None = None
        self._is_picture_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._clock = Clock()
        self._kv: object = None  # the pages to which `_clock` belongs
        self._num_answers = 0
        self._is_closed = False

    def watch(self, peer: PeerId, order: WatchSteps) -> None:
        """A frontend begins, continues, or stops watching."""
        now = monotonic()
        if not order.lease:
            self.remove(peer)
            return
        self._leases[peer] = now + order.lease
        self._is_picture_due = True
        if self._feed is None:
            self._feed = Feed(self._scheduler(), now)
            self._on_feed(self._feed)
        if self._timer is None:
            self._timer = self._loop.call_later(INTERVAL, self._tell)

    def remove(self, peer: PeerId) -> None:
        """A frontend is gone, or stops watching."""
        if self._leases.pop(peer, None) is not None and not self._leases:
            self._end()

    def ask(self, peer: PeerId, question: Question) -> None:
        """Compute the answer to a question in parts, and send it."""
        scheduler, now = self._scheduler(), monotonic()
        if isinstance(question, ShowLife):
            feed = self._feed or Feed(scheduler, now)
            if self._feed is None and scheduler is not None:
                feed.look(scheduler, now)
            self._send(peer, feed.lives.tell(question.number, question.request_id, now, time()))
        elif scheduler is not None and self._num_answers < _MAX_ANSWERS:
            self._num_answers += 1
            if isinstance(question, ListPages):
                self._work(peer, page_map(question.number, scheduler))
            else:
                self._note_clock(scheduler, now)
                self._work(peer, prefix_tree(question, scheduler, self._clock, now))

    def close(self) -> None:
        """Stop sending."""
        self._is_closed = True
        self._leases.clear()
        self._end()

    def _work(self, peer: PeerId, parts: Generator[None, None, Answer]) -> None:
        if self._is_closed:
            return
        try:
            next(parts)
        except StopIteration as end:
            self._num_answers -= 1
            self._send(peer, end.value)
        except BaseException:
            self._num_answers -= 1
            raise
        else:
            self._loop.call_later(_PAUSE, self._work, peer, parts)

    def _tell(self) -> None:
        self._timer = None
        now = monotonic()
        for peer in [peer for peer, until in self._leases.items() if until < now]:
            self.remove(peer)
        if self._feed is None:
            return
        scheduler = self._scheduler()
        if scheduler is not None:
            self._note_clock(scheduler, now)
        message = self._feed.take(scheduler, now, time(), is_whole=self._is_picture_due and scheduler is not None)
        self._is_picture_due = self._is_picture_due and scheduler is None
        self._channel.broadcast(self._leases, message)
        self._timer = self._loop.call_later(INTERVAL, self._tell)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._feed is not None:
            self._feed = None
            self._clock.restart()
            self._on_feed(None)

    def _note_clock(self, scheduler: Scheduler, now: float) -> None:
        cache = scheduler.kv.cache
        if cache is not None:
            if self._kv is not scheduler.kv:
                self._kv = scheduler.kv
                self._clock.restart()
            self._clock.note(cache.clock, now)

    def _send(self, peer: PeerId, answer: Answer) -> None:
        self._channel.broadcast((peer,), answer)
