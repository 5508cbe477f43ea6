"""The connection to one engine: hello, heartbeats, whether it is ready, how much waits there.

    connect --hello--> (nothing yet) --EngineReady--> ready <--> EngineNotReady: its requests stay where they are
                  ^                                     |
                  `-- SayHello (a scheduler that does not know us), or silence for heartbeat_timeout
                      (then over a new socket): the requests that it had are lost

The scheduler may start later, go away and come back. What becomes of the requests is the book's to say (`book.py`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import zmq

from penstock.core.config.options import SchedulerOptions
from penstock.frontend.engine.queue_gate import QueueGate
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
)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """How to reach a scheduler and what to say to it."""

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
        """End it; idempotent."""
        ...


Connect = Callable[[EngineAddress, Callable[[ToFrontend], None]], Channel]
"""Connects to an address, and calls back for each message that comes."""


def over_sockets(context: zmq.Context[Any], on_dropped: Callable[[], object] = lambda: None) -> Connect:
    """Connections over ZeroMQ; `on_dropped` is called for each message that cannot be read."""
    codec: Codec[ToFrontend] = Codec(ToFrontend)
    return lambda to, on_message: Dealer(context, to.address, to.name, codec, on_message, to.keys, on_dropped)


class LinkUser(Protocol):
    """Whoever has requests at an engine."""

    def on_tokens(self, batch: TokenBatch) -> None:
        """Output of requests."""
        ...

    def on_ready(self, link: "EngineLink") -> None:
        """The engine is ready, for the first time or again."""
        ...

    def on_not_ready(self, link: "EngineLink") -> None:
        """It takes no requests now. Those that it has, it keeps."""
        ...

    def on_lost(self, link: "EngineLink") -> None:
        """It has none of the requests that it was sent."""
        ...

    def on_beat(self) -> None:
        """Called every `heartbeat_interval`."""
        ...

    def is_waiting_for(self, link: "EngineLink") -> bool:
        """There is work for this engine."""
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
        """`limits` bound what waits there, until the engine tells its own."""
        self.to = to
        self.facts: EngineReady | None = None
        """The engine's facts while it is ready; None while no worker serves."""
        self.last_facts: EngineReady | None = None
        """The same, also while it is not ready any more."""
        self.stats: EngineStats | None = None
        self.queue = QueueGate(limits, lambda: self.stats)
        self.not_ready_reason = "the engine has not answered yet"
        self._connect_to = connect
        self._on_refused = on_refused
        self._loop = asyncio.get_running_loop()
        self._progress_at = self._loop.time()  # last sign that steps are computed, or that there was none to compute
        self._silent_since: float | None = None  # the last word of a scheduler that has been given up since
        self._is_missed = False  # there was work for it since

    def open(self, user: LinkUser) -> None:
        """Connect; from now on `user` is told what happens."""
        self._user = user
        self._connect()
        self._heartbeats = asyncio.create_task(self._keep_alive())

    @property
    def stuck_seconds(self) -> float:
        """How long an engine that says it is ready has computed nothing, though there is work for it here."""
        is_waited_for = self.facts is not None and self._user.is_waiting_for(self)
        return self._loop.time() - self._progress_at if is_waited_for else 0.0

    @property
    def silent_seconds(self) -> float:
        """How long nothing has been heard of a scheduler that was there once, though there was work for it."""
        if self._silent_since is None or not (self._is_missed or self._user.is_waiting_for(self)):
            return 0.0
        return self._loop.time() - self._silent_since

    def begin_work(self) -> None:
        """Work comes where there was none: from now on there should be progress."""
        self._progress_at = self._loop.time()

    def miss(self) -> None:
        """Somebody waits for this engine to be ready."""
        self._is_missed = True

    def send(self, message: Message) -> bool:
        """Queue a message; False if the queue to the scheduler is full."""
        self._last_sent = self._loop.time()
        return self._channel.send(message)

    def stop(self) -> None:
        """Say goodbye; `close` once there was time to write what is queued."""
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
        """Give the connection up: what is queued in it must not reach another scheduler. Then begin anew."""
        if self._has_heard:
            log.warning("engine silent, connecting again", seconds=self.to.heartbeat_timeout)
            self._silent_since, self._is_missed = self._last_heard, self._user.is_waiting_for(self)
        self._set_not_ready("the engine is silent")
        self._user.on_lost(self)
        self._channel.close()
        self._connect()
