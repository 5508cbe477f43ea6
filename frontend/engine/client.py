"""The frontend's side of the wire to the scheduler: submit, abort, and hand each delta to its request.

    connect --hello--> (nothing yet) --EngineReady--> ready <--> EngineNotReady: requests wait
                  ^                                     |
                  `-- SayHello (a scheduler that does not know us), or silence for heartbeat_timeout
                      (then over a new socket): every live request is lost, and submitted again with
                      its tokens so far once an engine is ready; if none is in time, it fails with EngineLost

The scheduler may start later, go away and come back; requests that find no engine wait a bounded time.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
import zmq

from penstock.frontend.engine.live_requests import MAX_LOSSES, DeltaSink, LiveRequest
from penstock.frontend.errors import EngineLost, Unavailable
from penstock.ipc import faults
from penstock.ipc.channel import Dealer
from penstock.ipc.codec import Codec
from penstock.ipc.deltas import deltas_of
from penstock.ipc.key_file import ChannelKeys
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    AddRequest,
    EngineNotReady,
    EngineReady,
    EngineStats,
    FrontendHello,
    Goodbye,
    Heartbeat,
    Message,
    PauseRequest,
    Refused,
    ResetPrefixCache,
    ResumeRequest,
    SayHello,
    ToFrontend,
    TokenBatch,
)

log = structlog.get_logger()

_before_tokens = faults.point("frontend.tokens")

RESUME_WAIT_SECONDS = 60.0
"""How long a request that lost its scheduler waits for another one, and its worker."""


@dataclass(frozen=True, slots=True)
class EngineLink:
    """How to reach the scheduler and what to say to it."""

    address: str
    name: str  # unique among frontends; also the socket's identity
    model_fingerprint: str
    heartbeat_interval: float = 1.0  # seconds
    heartbeat_timeout: float = 10.0
    keys: ChannelKeys | None = None


@dataclass
class EngineClient:
    """One connection to one scheduler. Make it inside the running event loop."""

    link: EngineLink
    context: zmq.Context[Any]
    on_refused: Callable[[str], None]
    on_dropped: Callable[[], object] = lambda: None
    """Called for each message that is none."""
    engine: EngineReady | None = None
    """The engine's facts while it is ready; None while no worker serves."""
    stats: EngineStats | None = None
    not_ready_reason: str = "the engine has not answered yet"
    _live: dict[str, LiveRequest] = field(default_factory=dict)  # by the ids that they were submitted with
    _submitted: dict[str, LiveRequest] = field(default_factory=dict)  # those that are not lost, by their wire ids
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the engine is ready."""

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._codec: Codec[ToFrontend] = Codec(ToFrontend)
        self._last_facts: EngineReady | None = None
        self._progress_at = self._loop.time()  # last sign that steps are computed, or that there was none to compute
        self._silent_since: float | None = None  # the last word of a scheduler that has been given up since
        self._is_missed = False  # there was work for it since
        self._connect()
        self._heartbeats = asyncio.create_task(self._keep_alive())

    @property
    def num_live(self) -> int:
        """Requests with unfinished sequences."""
        return len(self._live)

    @property
    def last_facts(self) -> EngineReady | None:
        """The facts of the engine that was ready last, even if it is not now."""
        return self._last_facts

    @property
    def stuck_seconds(self) -> float:
        """How long an engine that says it is ready has computed nothing, though there is work for it here."""
        return self._loop.time() - self._progress_at if self.engine is not None and self._is_pending else 0.0

    @property
    def silent_seconds(self) -> float:
        """How long nothing has been heard of a scheduler that was there once, though there was work for it."""
        if self._silent_since is None or not (self._is_missed or self._is_pending):
            return 0.0
        return self._loop.time() - self._silent_since

    @property
    def _is_pending(self) -> bool:
        return any(not live.is_paused for live in self._live.values())

    def _begin_pending(self) -> None:
        """Work comes: from now on there should be progress."""
        if not self._is_pending:
            self._progress_at = self._loop.time()

    async def wait_ready(self, seconds: float) -> EngineReady:
        """The engine's facts, waiting for them at most this long.

        Raises:
            Unavailable: if no engine is ready by then.
        """
        if self.engine is None:
            self._is_missed = True
            try:
                async with asyncio.timeout(seconds):
                    await self.ready.wait()
            except TimeoutError:
                raise Unavailable(f"no engine is ready: {self.not_ready_reason}", retry_after=5) from None
        if self.engine is None:  # it went away again before this task ran
            raise Unavailable(f"no engine is ready: {self.not_ready_reason}", retry_after=5)
        return self.engine

    def reset_prefix_cache(self) -> None:
        """Let the scheduler drop all cached pages that no sequence uses.

        Raises:
            Unavailable: if no engine is there, or the queue to the scheduler is full.
        """
        if self.engine is None or not self._send(ResetPrefixCache()):
            raise Unavailable(f"no engine is ready: {self.not_ready_reason}", retry_after=5)

    def submit(self, request: AddRequest, sink: DeltaSink, first_index: int = 0) -> None:
        """Send a request; its deltas go to `sink` until each sequence has finished or was aborted.

        An engine that is not ready at this moment gets it when it is.

        Raises:
            Unavailable: if the queue to the scheduler is full.
        """
        self._begin_pending()
        live = self._live[request.request_id] = LiveRequest(request, sink, first_index)
        if self.engine is None:
            live.lose(self._loop.time())
        elif not self._submit(live):
            del self._live[request.request_id]
            raise Unavailable("the queue to the engine is full", retry_after=1)

    def abort(self, request_id: str, sequence_idx: int = -1) -> None:
        """Stop a request, or one sequence of it; no delta of it is delivered any more. Idempotent."""
        live = self._live.get(request_id)
        if live is None or (sequence_idx >= 0 and sequence_idx not in live.unfinished):
            return
        live.unfinished.discard(sequence_idx)
        if sequence_idx < 0 or not live.unfinished:
            self._forget(live)
        if not live.is_lost:
            self._send(AbortRequest(live.wire_id, sequence_idx))

    def pause(self, request_id: str) -> None:
        """Let the engine give a request's rows and pages to others until `resume`. Idempotent."""
        live = self._live.get(request_id)
        if live is not None and not live.is_paused:
            live.is_paused = True
            if not live.is_lost:
                self._send(PauseRequest(live.wire_id))

    def resume(self, request_id: str) -> None:
        """Let a paused request go on. Idempotent."""
        live = self._live.get(request_id)
        if live is not None and live.is_paused:
            self._begin_pending()
            live.is_paused = False
            if not live.is_lost:
                self._send(ResumeRequest(live.wire_id))

    async def close(self) -> None:
        """Say goodbye and close the socket; what is still live gets no more deltas."""
        self._heartbeats.cancel()
        self._live.clear()
        self._submitted.clear()
        self._send(Goodbye())
        await asyncio.sleep(0.05)  # the socket does not linger; let its thread write what is queued
        self._dealer.close()

    def _connect(self) -> None:
        self._last_heard = self._loop.time()
        self._has_heard = False
        self._dealer: Dealer[ToFrontend] = Dealer(
            self.context,
            self.link.address,
            self.link.name,
            self._codec,
            self._on_message,
            self.link.keys,
            self.on_dropped,
        )
        self._say_hello()

    def _say_hello(self) -> None:
        self._send(FrontendHello(PROTOCOL_VERSION, self.link.name, self.link.model_fingerprint))

    def _send(self, message: Message) -> bool:
        self._last_sent = self._loop.time()
        return self._dealer.send(message)

    def _on_message(self, message: ToFrontend) -> None:
        self._last_heard = self._loop.time()
        if not self._has_heard:
            self._has_heard, self._silent_since = True, None
        if type(message) is not TokenBatch:
            self._on_news(message)
            return
        self._progress_at = self._last_heard
        _before_tokens()
        requests = self._submitted
        for delta in deltas_of(message):
            live = requests.get(delta.request_id)
            if live is None or not live.take(delta):
                continue  # aborted here, while the delta was under way
            if not live.unfinished:
                self._forget(live)
            live.sink.push(live.first_index, delta)

    def _on_news(self, message: ToFrontend) -> None:
        match message:
            case EngineReady():
                self._on_ready(message)
            case EngineNotReady():
                self._set_not_ready(message.reason)
            case SayHello():
                self._set_not_ready("the engine was restarted")
                self._lose_all()
                self._say_hello()
            case EngineStats():
                if self.stats is None or self.stats.num_steps != message.num_steps:
                    self._progress_at = self._last_heard
                self.stats = message
            case Refused():
                log.error("refused by the scheduler", reason=message.reason)
                self.on_refused(message.reason)

    def _on_ready(self, facts: EngineReady) -> None:
        if self.engine is None:
            self._progress_at = self._last_heard
            log.info("engine ready", max_model_len=facts.max_model_len, num_pages=facts.num_pages)
        self.engine = self._last_facts = facts
        self.ready.set()
        self._resubmit()

    def _set_not_ready(self, reason: str) -> None:
        if self.engine is not None:
            log.warning("engine not ready", reason=reason)
        self.engine = None
        self.not_ready_reason = reason
        self.ready.clear()

    # --- requests that outlive their scheduler ------------------------------------------------

    def _submit(self, live: LiveRequest) -> bool:
        message = live.message()
        if not self._send(message):
            return False
        live.is_lost = False
        self._submitted[live.wire_id] = live
        if live.is_paused:
            self._send(PauseRequest(live.wire_id))
        return True

    def _lose_all(self) -> None:
        """The scheduler is gone, or does not know us any more."""
        self._submitted.clear()
        now = self._loop.time()
        for live in list(self._live.values()):
            if not live.is_lost:
                live.lose(now)
                if live.num_losses > MAX_LOSSES:
                    self._fail(live, f"the engine went away {live.num_losses} times without a token of the request")

    def _resubmit(self) -> None:
        """Let the engine that is ready go on with what was lost, in the order in which it was begun."""
        lost = [live for live in self._live.values() if live.is_lost]
        for live in lost:
            if not self._submit(live):
                break  # the queue is full: the rest follows
        if lost:
            log.info("requests submitted again", num_requests=sum(not live.is_lost for live in lost))

    def _end_overdue(self, now: float) -> None:
        for live in list(self._live.values()):
            if live.is_lost and now - live.lost_at > RESUME_WAIT_SECONDS:
                self._fail(live, "the engine went away in the middle of the request and did not come back in time")

    def _fail(self, live: LiveRequest, message: str) -> None:
        self._forget(live)
        live.sink.fail(EngineLost(message, retry_after=1))

    def _forget(self, live: LiveRequest) -> None:
        del self._live[live.request.request_id]
        self._submitted.pop(live.wire_id, None)

    async def _keep_alive(self) -> None:
        link = self.link
        while True:
            await asyncio.sleep(link.heartbeat_interval)
            now = self._loop.time()
            self._end_overdue(now)
            if now - self._last_heard > link.heartbeat_timeout:
                self._on_silence()
            elif self.engine is not None and len(self._submitted) < len(self._live):
                self._resubmit()
            elif now - self._last_sent >= link.heartbeat_interval * 0.9:
                self._send(Heartbeat())

    def _on_silence(self) -> None:
        """Give the connection up: what is queued in it must not reach another scheduler. Then begin anew."""
        if self._has_heard:
            log.warning("engine silent, connecting again", seconds=self.link.heartbeat_timeout)
            self._silent_since, self._is_missed = self._last_heard, self._is_pending
        self._set_not_ready("the engine is silent")
        self._lose_all()
        self._dealer.close()
        self._connect()
