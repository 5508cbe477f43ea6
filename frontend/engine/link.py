"""The connection to one engine: hello, heartbeats, readiness, and how much is waiting there.

    connect --hello--> (nothing yet) --EngineReady--> ready <--> EngineNotReady: its requests stay where they are
                  ^                                     |
                  `-- SayHello (the scheduler does not know us), or silence for heartbeat_timeout
                      (then over a new socket): the requests that it had are lost

The scheduler may start later, disappear and come back. `book.py` decides what happens to the requests.

The queue gate refuses a request before anything expensive is done for it. The scheduler has the last word
(`core/sequences/intake.py`). Its reports about its queue are up to a fraction of a second old, so between two of them
the gate adds what this frontend has admitted since, and what is still being tokenized.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import structlog
import zmq

from penstock.core.config.options import SchedulerOptions
from penstock.frontend.errors import Overloaded
from penstock.ipc.channel import Dealer
from penstock.ipc.codec import Codec
from penstock.ipc.key_file import ChannelKeys
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    EngineNotReady,
    EngineReady,
    EngineStats,
    FrontendHello,
    Goodbye,
    Heartbeat,
    Message,
    Refused,
    SayHello,
    ToFrontend,
    TokenBatch,
    WaitingTenant,
)
from penstock.ipc.queue_turns import turns_before

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """How to reach a scheduler, and the content of the hello."""

    address: str
    name: str  # unique among frontends; also the socket's identity
    model_fingerprint: str
    heartbeat_interval: float = 1.0  # seconds
    heartbeat_timeout: float = 10.0
    keys: ChannelKeys | None = None


class Channel(Protocol):
    """One connection to a scheduler."""

    def send(self, message: Message) -> bool:
        """Queue a message; False if the queue is full."""
        ...

    def close(self) -> None:
        """Close it; idempotent."""
        ...


Connect = Callable[[EngineAddress, Callable[[ToFrontend], None]], Channel]
"""Connects to an address; the callback gets each message."""


def over_sockets(context: zmq.Context[Any], on_dropped: Callable[[], object] = lambda: None) -> Connect:
    """Connections over ZeroMQ; `on_dropped` is called for each message that cannot be read."""
    codec: Codec[ToFrontend] = Codec(ToFrontend)
    return lambda to, on_message: Dealer(context, to.address, to.name, codec, on_message, to.keys, on_dropped)


class LinkUser(Protocol):
    """Whatever has requests at an engine."""

    def on_tokens(self, batch: TokenBatch) -> None:
        """Output of requests."""
        ...

    def on_ready(self, link: "EngineLink") -> None:
        """The engine is ready, for the first time or again."""
        ...

    def on_not_ready(self, link: "EngineLink") -> None:
        """It accepts no requests now. It keeps those that it has."""
        ...

    def on_lost(self, link: "EngineLink") -> None:
        """It has lost all requests that it was sent."""
        ...

    def on_beat(self) -> None:
        """Called every `heartbeat_interval`."""
        ...

    def is_waiting_for(self, link: "EngineLink") -> bool:
        """Whether there is work for this engine."""
        ...


class EngineLink:
    """One connection to one scheduler. Make it inside the running event loop, then `open` it."""

    def __init__(
        self,
        to: EngineAddress,
        limits: SchedulerOptions,
        connect: Connect,
        on_refused: Callable[[str], None],
    ) -> None:
        """`limits` bound the queue until the engine reports its own."""
        self.to = to
        self.facts: EngineReady | None = None
        """The engine's facts while it is ready; None while no worker is serving."""
        self.last_facts: EngineReady | None = None
        """The same, but kept while it is not ready."""
        self.stats: EngineStats | None = None
        self.queue = QueueGate(limits, lambda: self.stats)
        self.not_ready_reason = "the engine has not answered yet"
        self._connect_to = connect
        self._on_refused = on_refused
        self._loop = asyncio.get_running_loop()
        self._progress_at = self._loop.time()  # last sign that steps are computed, or that there was nothing to compute
        self._silent_since: float | None = None  # last message of a scheduler that has been given up
        self._is_missed = False  # there has been work for it since then

    def open(self, user: LinkUser) -> None:
        """Connect; from now on `user` gets the events."""
        self._user = user
        self._connect()
        self._heartbeats = asyncio.create_task(self._keep_alive())

    @property
    def stuck_seconds(self) -> float:
        """How long an engine that says it is ready has computed nothing although there is work for it here."""
        is_waited_for = self.facts is not None and self._user.is_waiting_for(self)
        return self._loop.time() - self._progress_at if is_waited_for else 0.0

    @property
    def silent_seconds(self) -> float:
        """How long a scheduler that was once there has been silent although there was work for it."""
        if self._silent_since is None or not (self._is_missed or self._user.is_waiting_for(self)):
            return 0.0
        return self._loop.time() - self._silent_since

    def begin_work(self) -> None:
        """Work has arrived where there was none: from now on there should be progress."""
        self._progress_at = self._loop.time()

    def miss(self) -> None:
        """A request is waiting for this engine to be ready."""
        self._is_missed = True

    def send(self, message: Message) -> bool:
        """Queue a message; False if the queue to the scheduler is full."""
        self._last_sent = self._loop.time()
        return self._channel.send(message)

    def stop(self) -> None:
        """Say goodbye; call `close` after there was time to send what is queued."""
        self._heartbeats.cancel()
        self.send(Goodbye())

    def close(self) -> None:
        """Close the connection; what is queued in it is dropped."""
        self._channel.close()

    def _connect(self) -> None:
        self._last_heard = self._loop.time()
        self._has_heard = False
        self._channel = self._connect_to(self.to, self._on_message)
        self._say_hello()

    def _say_hello(self) -> None:
        self.send(FrontendHello(PROTOCOL_VERSION, self.to.name, self.to.model_fingerprint))

    def _on_message(self, message: ToFrontend) -> None:
        self._last_heard = self._loop.time()
        if not self._has_heard:
            self._has_heard, self._silent_since = True, None
        if type(message) is TokenBatch:
            self._progress_at = self._last_heard
            self._user.on_tokens(message)
        else:
            self._on_news(message)

    def _on_news(self, message: ToFrontend) -> None:
        match message:
            case EngineReady():
                self._on_ready(message)
            case EngineNotReady():
                self._set_not_ready(message.reason)
            case SayHello():
                self._set_not_ready("the engine was restarted")
                self._user.on_lost(self)
                self._say_hello()
            case EngineStats():
                if self.stats is None or self.stats.num_steps != message.num_steps:
                    self._progress_at = self._last_heard
                self.stats = message
            case Refused():
                log.error("refused by the scheduler", reason=message.reason)
                self._on_refused(message.reason)

    def _on_ready(self, facts: EngineReady) -> None:
        if self.facts is None:
            self._progress_at = self._last_heard
            log.info("engine ready", max_model_len=facts.max_model_len, num_pages=facts.num_pages)
        self.facts = self.last_facts = facts
        self.queue.set_limits(facts)
        self._user.on_ready(self)

    def _set_not_ready(self, reason: str) -> None:
        if self.facts is not None:
            log.warning("engine not ready", reason=reason)
        self.facts = None
        self.not_ready_reason = reason
        self._user.on_not_ready(self)

    async def _keep_alive(self) -> None:
        to = self.to
        while True:
            await asyncio.sleep(to.heartbeat_interval)
            self._user.on_beat()
            now = self._loop.time()
            if now - self._last_heard > to.heartbeat_timeout:
                self._on_silence()
            elif now - self._last_sent >= to.heartbeat_interval * 0.9:
                self.send(Heartbeat())

    def _on_silence(self) -> None:
        """Drop the connection, because what is queued in it must not reach another scheduler. Then reconnect."""
        if self._has_heard:
            log.warning("engine silent, reconnecting", seconds=self.to.heartbeat_timeout)
            self._silent_since, self._is_missed = self._last_heard, self._user.is_waiting_for(self)
        self._set_not_ready("the engine is silent")
        self._user.on_lost(self)
        self._channel.close()
        self._connect()


# --- the engine's queue ----------------------------------------------------------------------------

UNKNOWN_RETRY_SECONDS, MAX_RETRY_SECONDS = 5, 120


def retry_after(stats: EngineStats | None, num_seqs: int, num_tokens: int = 0) -> int:
    """Whole seconds until this many sequences and tokens have left the queue at its current rate; at least 1."""
    if stats is None:
        return 1
    rates = ((num_seqs, stats.drained_seqs_per_second), (num_tokens, stats.drained_tokens_per_second))
    seconds = max(num / rate if rate > 0 else UNKNOWN_RETRY_SECONDS for num, rate in rates if num > 0)
    return min(max(ceil(seconds), 1), MAX_RETRY_SECONDS)


class _Load:
    """Requests that are not in the scheduler's reports yet."""

    def __init__(self) -> None:
        self.groups: Counter[str] = Counter()  # by tenant
        self.seqs: Counter[str] = Counter()
        self.num_seqs = 0
        self.num_tokens = 0

    def add(self, tenant: str, num_seqs: int, num_tokens: int) -> None:
        self.groups[tenant] += 1
        self.seqs[tenant] += num_seqs
        self.num_seqs += num_seqs
        self.num_tokens += num_tokens

    def take(self, tenant: str, num_seqs: int, num_tokens: int) -> None:
        self.groups[tenant] -= 1
        self.seqs[tenant] -= num_seqs
        if not self.groups[tenant]:
            del self.groups[tenant], self.seqs[tenant]
        self.num_seqs -= num_seqs
        self.num_tokens -= num_tokens


class QueueGate:
    """Counts by sequences, by prompt tokens (a prompt with `n` sequences counts `n` times), and by turns."""

    def __init__(self, options: SchedulerOptions, stats: Callable[[], EngineStats | None]) -> None:
        """`options` apply until the engine reports its own; `stats` returns its latest statistics, None before any."""
        self._max_seqs = options.max_num_queued_seqs
        self._max_tokens = options.max_num_queued_tokens
        self._stats = stats
        self._told: EngineStats | None = None
        self._since = _Load()  # arrived since the latest statistics
        self._num_ended_since = 0  # sequences
        self._reserved = _Load()  # admitted, but not submitted yet

    def set_limits(self, facts: EngineReady) -> None:
        """Use the scheduler's own limits; a frontend started on its own has no such options."""
        self._max_seqs = facts.max_num_queued_seqs or self._max_seqs
        self._max_tokens = facts.max_num_queued_tokens or self._max_tokens

    def check(self, num_seqs: int = 1, num_tokens: int = 0, tenant: str | None = None) -> None:
        """Refuse what would not fit, or would wait too long for its turn. Without a tenant: as the busiest one.

        A request that finds the queue empty is admitted, however many tokens it has.

        Raises:
            Overloaded: with the seconds until there should be room.
        """
        stats = self._latest()
        num_waiting, num_tokens_waiting = self._reserved.num_seqs, self._reserved.num_tokens
        num_free_rows = 0
        if stats is not None:
            num_waiting += stats.num_waiting + self._since.num_seqs - self._num_ended_since
            num_tokens_waiting += stats.num_waiting_tokens + self._since.num_tokens
            if not stats.num_waiting:  # newer requests went straight to free rows
                num_free_rows = stats.num_rows - stats.num_running
                num_waiting -= num_free_rows
                num_tokens_waiting = num_tokens_waiting if num_waiting > 0 else 0
        counts = self._counts(stats)
        if tenant is None:
            tenant = max(counts, key=lambda each: each.num_groups).tenant if counts else ""
        is_beside_others = bool(counts) and all(each.tenant != tenant for each in counts)
        max_seqs = self._max_seqs * (2 if is_beside_others else 1)  # as in core/sequences/intake.py
        excess = num_waiting + num_seqs - max_seqs
        if excess > 0:
            raise Overloaded(
                f"the queue is full: {num_waiting} sequences are waiting, the limit is {max_seqs}",
                retry_after=retry_after(stats, excess),
            )
        excess_tokens = num_tokens_waiting + num_tokens - self._max_tokens
        if num_tokens_waiting > 0 and excess_tokens > 0:
            raise Overloaded(
                f"the queue is full: its prompts have {num_tokens_waiting} tokens, the limit is {self._max_tokens}",
                retry_after=retry_after(stats, 0, excess_tokens),
            )
        if stats is not None and stats.max_turns and num_waiting > 0:
            num_turns = turns_before(tenant, counts) - num_free_rows - self._num_ended_since
            if num_turns >= stats.max_turns:
                raise Overloaded(
                    f"the queue is too long: {num_turns} others would have their turn before; at most "
                    f"{stats.max_turns} may",
                    retry_after=retry_after(stats, num_turns + 1 - stats.max_turns),
                )

    @contextmanager
    def reserve(self, num_seqs: int, num_tokens: int, tenant: str) -> Iterator[None]:
        """Reserve room while a request is tokenized; `num_tokens` is an upper bound from its bytes.

        Raises:
            Overloaded: if there is no room.
        """
        self.check(num_seqs, num_tokens, tenant)
        self._reserved.add(tenant, num_seqs, num_tokens)
        try:
            yield
        finally:
            self._reserved.take(tenant, num_seqs, num_tokens)

    def submitted(self, num_seqs: int, num_tokens: int, tenant: str) -> None:
        """A request goes to the engine, with its actual tokens."""
        self._latest()
        self._since.add(tenant, num_seqs, num_tokens)

    def ended(self, num_seqs: int) -> None:
        """A submitted request has ended: one less is waiting, perhaps itself."""
        self._latest()
        self._num_ended_since += num_seqs

    def _counts(self, stats: EngineStats | None) -> list[WaitingTenant]:
        """What each tenant has waiting, as far as known here."""
        groups, seqs = self._since.groups + self._reserved.groups, self._since.seqs + self._reserved.seqs
        for each in () if stats is None else stats.waiting_tenants:
            groups[each.tenant] += each.num_groups
            seqs[each.tenant] += each.num_seqs
        return [WaitingTenant(name, seqs[name], groups[name]) for name in groups]

    def _latest(self) -> EngineStats | None:
        stats = self._stats()
        if stats is not self._told:
            self._told = stats
            self._since = _Load()
            self._num_ended_since = 0
        return stats
