"""An engine in a thread of this process. A frontend exchanges messages with it, as with a scheduler.

    EngineLink ──send──▶ inbox ──▶ thread: InProcessEngine ──▶ call_soon_threadsafe ──▶ EngineLink

The messages are those of the sockets (`ipc/messages/`), but they are not encoded.
"""

import asyncio
import gc
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import chain
from typing import Any

import structlog

from penstock.config import Config, ConfigError
from penstock.core.engine.readiness import engine_ready
from penstock.core.scheduling.part import SchedulerPart
from penstock.core.scheduling.scheduler import Refusal
from penstock.frontend.engine.connection import EngineAddress
from penstock.gpu_worker.devices.out_of_memory import failure_reason
from penstock.in_process import OWNER, InProcessEngine
from penstock.ipc.messages import (
    AbortRequest,
    AddRequest,
    EngineNotReady,
    FrontendHello,
    Goodbye,
    Message,
    PauseRequest,
    ResetPrefixCache,
    ResumeRequest,
    SequenceDelta,
    ToFrontend,
    TokenBatch,
)
from penstock.ipc.overrides import overriding

log = structlog.get_logger()

_in_use = threading.Lock()
"""Only one engine in a process, because the CPU kernels have one set of buffers for each process."""


class EngineThread:
    """The thread, and a frontend's channel to it. A step that fails ends the thread and all requests."""

    patience = 0.0
    """Seconds to wait for the engine when it is not ready: after a failure it never gets ready again."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._inbox: deque[Message | None] = deque()  # None: the end
        self._wake = threading.Event()
        self._tell: Callable[[Any], object] = lambda message: None
        self._ended: Future[None] | None = None  # of the thread that was started last

    async def start(self) -> None:
        """Load the model. If this is cancelled, the thread ends once it has loaded: loading cannot be broken off.

        Raises:
            ConfigError: if the configuration or the checkpoint cannot work, or another engine lives in this process.
        """
        await self.stop()  # a start that was cancelled may still be loading
        if not _in_use.acquire(blocking=False):
            raise ConfigError(
                "another LLM lives in this process: close() it first, or start this one with engine='process'"
            )
        self._inbox.clear()
        loaded: Future[None] = Future()
        self._ended = Future()
        threading.Thread(target=self._run, args=(loaded, self._ended), name="penstock-engine", daemon=True).start()
        waiting = asyncio.wrap_future(loaded)
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            waiting.add_done_callback(lambda it: it.exception())  # nobody else will look at it
            self.send(None)
            raise

    async def stop(self) -> None:
        """End the thread, and free what it held."""
        if self._ended is not None:
            self.send(None)
            await asyncio.shield(asyncio.wrap_future(self._ended))

    def addresses(self, name: str, model_fingerprint: str) -> list[EngineAddress]:
        """What a link to the engine needs. The engine may be silent for as long as a step takes."""
        return [EngineAddress("", name, model_fingerprint, heartbeat_timeout=float("inf"))]

    # --- the channel --------------------------------------------------------------------------

    def connect(
        self, _to: EngineAddress, on_message: Callable[[ToFrontend], None], _on_broken: Callable[[], None]
    ) -> "EngineThread":
        """Pass the engine's messages to `on_message`, in the event loop that runs now."""
        loop = asyncio.get_running_loop()

        def tell(message: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(on_message, message)

        self._tell = tell
        return self

    def send(self, message: Message | None) -> bool:
        """Queue a message."""
        self._inbox.append(message)
        self._wake.set()
        return True

    def close(self) -> None:
        """Pass on no more messages."""
        self._tell = lambda message: None

    # --- in the thread ------------------------------------------------------------------------

    def _run(self, loaded: Future[None], ended: Future[None]) -> None:
        try:
            engine = InProcessEngine(self._config)
        except BaseException as error:
            _in_use.release()
            ended.set_result(None)
            loaded.set_exception(error)
            return
        loaded.set_result(None)
        try:
            self._serve(engine)
        except Exception as error:
            reason = failure_reason(error)
            log.error("engine failed", reason=reason, exc_info=error)
            self._tell(EngineNotReady(f"it failed: {reason}"))
            live = chain.from_iterable((*each.running, *each.waiting) for each in engine.scheduler.requests.values())
            self._tell(TokenBatch(0, tuple(seq.error_delta(reason) for seq in live)))
            self._refuse_all(reason)
        finally:
            engine.close()
            del engine
            gc.collect()  # weights and pool are in reference cycles
            _in_use.release()
            ended.set_result(None)

    def _serve(self, engine: InProcessEngine) -> None:
        telling = overriding(SchedulerPart, engine.scheduler.parts.all, "take_news")
        while True:
            while self._inbox:
                message = self._inbox.popleft()
                if message is None:
                    return
                self._take(engine, message)
            step = engine.step()
            for part in telling:
                for news in part.take_news():
                    self._tell(news)
            if step.deltas:
                self._tell(TokenBatch(0, tuple(step.deltas)))
            elif step.plan is None:
                self._wake.wait(engine.seconds_to_wait)
                self._wake.clear()

    def _refuse_all(self, reason: str) -> None:
        """Refuse all queued requests, including those that were sent before the failure was known."""
        while True:
            while self._inbox:
                message = self._inbox.popleft()
                if message is None:
                    return
                if isinstance(message, AddRequest):
                    self._refuse(message, Refusal("internal", reason))
            self._wake.wait()
            self._wake.clear()

    def _refuse(self, request: AddRequest, refusal: Refusal) -> None:
        code, reason = refusal
        ends = (
            SequenceDelta(request.request_id, i, (), "error", error=reason, error_code=code) for i in range(request.n)
        )
        self._tell(TokenBatch(0, tuple(ends)))

    def _take(self, engine: InProcessEngine, message: Message) -> None:
        scheduler = engine.scheduler
        match message:
            case FrontendHello():
                self._tell(engine_ready(engine.hello, self._config.scheduler))
            case AddRequest():
                refusal = engine.add_request(message)
                if refusal is not None:
                    self._refuse(message, refusal)
            case AbortRequest():
                scheduler.abort(message.request_id, message.sequence_idx, time.monotonic())
            case PauseRequest():
                scheduler.pause(message.request_id, time.monotonic())
            case ResumeRequest():
                scheduler.resume(message.request_id)
            case ResetPrefixCache():
                scheduler.reset_prefix_cache()
            case Goodbye():
                scheduler.abort_owner(OWNER)
            case _:
                for part in scheduler.parts.all:
                    if type(message) in part.orders:
                        part.order(message)
