"""The scheduler process: one event loop that moves messages between frontends, `Scheduler` and the worker.

    frontends --AddRequest/AbortRequest--> scheduler.add_request/abort --+
                                                                         v
    worker   <--StepPlan------------------ scheduler.schedule() <---- _pump(), once per batch of messages
    worker   --StepResult----------------> scheduler.process()  ----> _pump(), then TokenBatch to the frontends

All decisions are `Scheduler`'s; here are sockets, clocks and the list of peers.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from time import monotonic

import structlog
import zmq
from msgspec.structs import replace

from penstock.core.config import Config, channel_keys
from penstock.core.engine.culprits import Culprits
from penstock.core.engine.peers import Peers
from penstock.core.engine.queue_timeouts import QueueTimeouts
from penstock.core.engine.step_trace import StepTrace
from penstock.core.scheduling.scheduler import Refusal, Scheduler, UnexpectedResultError
from penstock.core.scheduling.suspects import ENDS_WORKERS
from penstock.core.sequences.drain_rate import DrainRate
from penstock.ipc import faults
from penstock.ipc.channel import PeerId, Router
from penstock.ipc.codec import Codec, MalformedMessage
from penstock.ipc.curve import Doorkeeper
from penstock.ipc.logs import num_dropped_log_lines
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    AddRequest,
    EngineNotReady,
    EngineReady,
    EngineStats,
    FromFrontend,
    FromWorker,
    FrontendHello,
    Goodbye,
    GrammarPrepared,
    Heartbeat,
    Message,
    PauseRequest,
    Probe,
    Refused,
    ResetPrefixCache,
    ResumeRequest,
    SayHello,
    SequenceDelta,
    StepResult,
    TokenBatch,
    Welcome,
    WorkerFailed,
    WorkerHello,
)

log = structlog.get_logger()

_before_plan, _after_plan = faults.point("scheduler.plan"), faults.point("scheduler.planned")
_before_tokens = faults.point("scheduler.tokens")

_STATS_INTERVAL = 0.2
"""Seconds between two EngineStats at most: fresh enough to watch, rare enough to cost nothing."""

STEP_SECONDS, STEP_SECONDS_PER_TOKEN = 120.0, 0.25
"""A step that takes longer than these together does not end any more. Generous: kernels may have to be compiled in it,
and a large model on a small CPU is slow."""


class Engine:
    """One scheduler, its worker and its frontends. Lives in a running event loop until `close()`."""

    def __init__(self, config: Config, on_hung_worker: Callable[[int], None] = lambda pid: None) -> None:
        """`on_hung_worker` is told the process id of a worker that does not answer any more."""
        self._config = config
        self._on_hung_worker = on_hung_worker
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._trace = StepTrace(config.scheduler.step_trace) if config.scheduler.step_trace else None
        self._scheduler: Scheduler | None = None  # exists from the first worker's hello, which says how large it is
        self._worker: PeerId | None = None
        self._hello: WorkerHello | None = None  # of the present or last worker
        self._progress_at = 0.0  # last result, or first plan after none was in flight
        self._frontends = Peers(config.ipc.heartbeat_timeout)
        self._pump_is_scheduled = False
        self._worker_says = Heartbeat()  # its latest
        self._drain = DrainRate()
        self._culprits = Culprits()
        self._queue_timeouts = QueueTimeouts(config.scheduler.queue_timeout)
        self._stats_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        keys = channel_keys(config)
        self._doorkeeper = None if keys is None else Doorkeeper(self._context, keys)
        self.frontend_channel: Router[FromFrontend] = Router(
            self._context, config.ipc.frontend_address, Codec(FromFrontend), self._on_frontend_message, keys=keys
        )
        self.worker_channel: Router[FromWorker] = Router(
            self._context,
            config.ipc.worker_address,
            Codec(FromWorker),
            self._on_worker_message,
            config.ipc.heartbeat_timeout,
            keys,
        )

    @property
    def has_worker(self) -> bool:
        """Whether a worker is connected."""
        return self._worker is not None

    # --- frontends --------------------------------------------------------------------------

    def _on_frontend_message(self, peer: PeerId, message: FromFrontend) -> None:
        if isinstance(message, FrontendHello):
            self._on_frontend_hello(peer, message)
            return
        if isinstance(message, Probe):
            self.frontend_channel.send(peer, self._readiness())
            return
        if peer not in self._frontends:
            if isinstance(message, Goodbye):
                return
            self.frontend_channel.send(peer, SayHello())
            raise MalformedMessage("it has not said hello")
        self._frontends.seen(peer, monotonic())
        match message:
            case AddRequest():
                self._on_add_request(peer, message)
            case AbortRequest() | PauseRequest() | ResumeRequest():
                self._steer(peer, message)
            case ResetPrefixCache():
                num_pages = self._scheduler.reset_prefix_cache() if self._scheduler is not None else 0
                log.info("prefix cache reset", freed_pages=num_pages)
                self._changed()
            case Goodbye():
                self._drop_frontend(peer, "it left")
            case Heartbeat():
                pass

    def _on_frontend_hello(self, peer: PeerId, hello: FrontendHello) -> None:
        refusal = self._why_not(hello.protocol_version, hello.model_fingerprint)
        if refusal:
            log.error("frontend refused", name=hello.name, reason=refusal)
            self.frontend_channel.send(peer, Refused(refusal))
            return
        if peer in self._frontends:  # it starts anew
            self._drop_frontend(peer, "it said hello again")
        self._frontends.seen(peer, monotonic())
        log.info("frontend connected", name=hello.name)
        self.frontend_channel.send(peer, self._readiness())
        self._changed()

    def _on_add_request(self, peer: PeerId, request: AddRequest) -> None:
        if self._scheduler is None:
            refusal: Refusal | None = Refusal("internal", "no worker has connected yet")
        elif self._culprits.knows(request.prompt_token_ids, request.sampling, monotonic()):
            refusal = Refusal("ends_workers", ENDS_WORKERS)
        else:
            refusal = self._scheduler.add_request(request, peer, monotonic())
        if refusal is None:
            if not request.progress and self._scheduler is not None:
                self._queue_timeouts.note(monotonic(), request.request_id)
            self._changed()
            return
        deltas = [
            SequenceDelta(request.request_id, i, (), "error", error=refusal.reason, error_code=refusal.code)
            for i in range(request.n)
        ]
        self._send_deltas(peer, 0, deltas)

    def _steer(self, peer: PeerId, message: AbortRequest | PauseRequest | ResumeRequest) -> None:
        scheduler = self._scheduler
        request = scheduler.requests.get(message.request_id) if scheduler is not None else None
        if scheduler is None or request is None:
            return  # it has ended meanwhile
        if request.owner != peer:
            raise MalformedMessage("the request is another frontend's")
        match message:
            case AbortRequest():
                scheduler.abort(message.request_id, message.sequence_idx)
            case PauseRequest():
                scheduler.pause(message.request_id)
            case ResumeRequest():
                scheduler.resume(message.request_id)
        self._changed()

    def _expire_queued(self, now: float) -> None:
        expired = self._queue_timeouts.expire(now, self._scheduler) if self._scheduler is not None else {}
        for owner, deltas in expired.items():
            self._send_deltas(owner, 0, deltas)
            self._changed()

    def _drop_frontend(self, peer: PeerId, why: str) -> None:
        self._frontends.forget(peer)
        num_aborted = self._scheduler.abort_owner(peer) if self._scheduler is not None else 0
        log.info("frontend gone", peer=peer.decode(errors="replace"), why=why, aborted_requests=num_aborted)
        self._changed()

    def _send_deltas(self, peer: PeerId, step_id: int, deltas: Sequence[SequenceDelta]) -> None:
        self._send_tokens(peer, TokenBatch(step_id, tuple(deltas)))

    def _send_tokens(self, peer: PeerId, batch: TokenBatch) -> None:
        if not self.frontend_channel.send(peer, batch) and peer in self._frontends:
            self._drop_frontend(peer, "it does not take its messages")

    def _tell_frontends(self, message: Message) -> None:
        for peer in self._frontends.all():
            self.frontend_channel.send(peer, message)

    # --- worker -----------------------------------------------------------------------------

    def _on_worker_message(self, peer: PeerId, message: FromWorker) -> None:
        if isinstance(message, WorkerHello):
            self._on_worker_hello(peer, message)
            return
        if peer != self._worker:
            self.worker_channel.send(peer, SayHello())
            raise MalformedMessage("it has not said hello, or was dropped")
        match message:
            case StepResult():
                self._on_step_result(message)
            case GrammarPrepared():
                self._on_grammar_prepared(message)
            case WorkerFailed():
                log.error("worker failed", step_id=message.step_id, reason=message.reason)
                self._lose_worker(message.reason, is_out_of_memory=message.is_out_of_memory)
            case Heartbeat():
                self._worker_says = message

    def _on_worker_hello(self, peer: PeerId, hello: WorkerHello) -> None:
        refusal = self._why_not(hello.protocol_version, hello.model_fingerprint)
        if not refusal and self._worker not in (None, peer) and self.worker_channel.send(self._worker, Heartbeat()):
            refusal = "another worker serves already"
        if refusal:
            log.error("worker refused", name=hello.name, reason=refusal)
            self.worker_channel.send(peer, Refused(refusal))
            return
        has_died = self._hello is not None and self._hello.pid != hello.pid  # and this one came before it was missed
        self._worker, self._hello = peer, hello
        self.worker_channel.send(peer, Welcome(PROTOCOL_VERSION))
        if self._scheduler is None:
            self._scheduler = Scheduler.for_worker(self._config.scheduler, hello)
        else:
            self._reset_scheduler(hello, has_died=has_died)
        log.info("worker connected", name=hello.name, device=hello.device, dtype=hello.dtype, pages=hello.num_pages)
        self._tell_frontends(self._readiness())
        self._changed()

    def _lose_worker(self, reason: str, *, is_out_of_memory: bool = False) -> None:
        log.error("worker lost; its sequences wait for the next one", reason=reason)
        assert self._hello is not None
        assert self._scheduler is not None
        self._worker = None
        is_cut = is_out_of_memory and self._scheduler.step_size.cut(self._scheduler.in_flight)
        self._reset_scheduler(self._hello, has_died=not is_cut)
        if is_cut:
            limits = self._scheduler.limits
            log.warning("steps are smaller from now on", rows=limits.max_num_seqs, tokens=limits.max_num_batched_tokens)
        self._tell_frontends(self._readiness())
        self._changed()

    def _lose_stuck_worker(self, reason: str) -> None:
        """It may still be there, and hold what the next one needs: its parent is asked to end it."""
        assert self._hello is not None
        if self._hello.pid:
            self._on_hung_worker(self._hello.pid)
        self._lose_worker(reason)

    def _check_progress(self, now: float) -> None:
        """Judge a worker by its results alone: a heartbeat shows that a process lives, not that its device works."""
        scheduler = self._scheduler
        if self._worker is None or scheduler is None:
            return
        if not scheduler.in_flight:
            if scheduler.grammars.is_trying and now - self._progress_at > STEP_SECONDS:
                self._lose_stuck_worker(f"a grammar is not ready after {STEP_SECONDS:.0f} s")
            return
        step = scheduler.in_flight[0]
        num_tokens = len(step.decodes.seqs) + sum(chunk.num_new for chunk in step.chunks)
        seconds = STEP_SECONDS + STEP_SECONDS_PER_TOKEN * num_tokens
        if now - self._progress_at > seconds:
            self._lose_stuck_worker(f"step {step.step_id} of {num_tokens} tokens has no result after {seconds:.0f} s")

    def _reset_scheduler(self, hello: WorkerHello, *, has_died: bool) -> None:
        assert self._scheduler is not None
        if self._trace is not None:
            self._trace.forget_planned()
        requests = dict(self._scheduler.requests)
        for owner, deltas in self._scheduler.reset_worker(hello, has_died=has_died).items():
            for delta in deltas:
                if delta.error_code == "ends_workers":
                    culprit = requests[delta.request_id]
                    self._culprits.note(culprit.prompt_token_ids, culprit.sampling, monotonic())
                log.error("sequence ended", request_id=delta.request_id, code=delta.error_code, reason=delta.error)
            self._send_deltas(owner, 0, deltas)
        if num_suspects := len(self._scheduler.suspects):
            log.info("requests in flight when the worker died are tried in halves", num_suspects=num_suspects)

    def _on_step_result(self, result: StepResult) -> None:
        assert self._scheduler is not None
        in_flight = self._scheduler.in_flight
        oldest = in_flight[0].step_id if in_flight else self._scheduler.totals.num_steps
        if result.step_id < oldest:
            return  # of a plan that it got before it said hello once more
        self._progress_at = received = monotonic()
        try:
            output = self._scheduler.process(result)
        except UnexpectedResultError as error:
            self._lose_stuck_worker(f"its result makes no sense: {error}")
            return
        if result.row_errors:
            _log_invalid_logits(output.values())
        if self._trace is not None:
            process_us = (monotonic() - received) * 1e6
            self._trace.returned(result.step_id, received, process_us, result.num_forward_us, result.num_idle_us)
        _before_tokens()
        self._pump()  # the worker first: its time is dearer than the clients'
        for owner, batch in output.items():
            self._send_tokens(owner, batch)
        self._changed()

    def _on_grammar_prepared(self, message: GrammarPrepared) -> None:
        assert self._scheduler is not None
        for owner, deltas in self._scheduler.grammar_prepared(message).items():
            self._send_deltas(owner, 0, deltas)
        self._changed()

    # --- steps ------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send plans until the pipeline is full or nothing is left to compute."""
        self._pump_is_scheduled = False
        scheduler = self._scheduler
        if scheduler is None or self._worker is None:
            return
        while scheduler.can_schedule:
            started = monotonic()
            if not (scheduler.in_flight or scheduler.grammars.is_trying):
                self._progress_at = started
            step = scheduler.schedule(started, with_record=self._trace is not None)
            if scheduler.grammars.messages:
                for message in scheduler.grammars.take_messages():
                    self.worker_channel.send(self._worker, message)  # one that does not arrive is noticed at the plan
            if step is None:
                return
            for seq in step.newcomers:
                if seq.request.arrived:
                    seq.queued_us = int((started - seq.request.arrived) * 1e6)
            if self._trace is not None:
                sent = monotonic()
                self._trace.planned(step.plan.step_id, step.record, (sent - started) * 1e6, sent)
            _before_plan()
            if not self.worker_channel.send(self._worker, step.plan):
                self._lose_stuck_worker("it is not connected any more")
                return
            _after_plan()

    def _changed(self) -> None:
        """Something may be schedulable, and the counters differ: once for all messages of this turn."""
        if not self._pump_is_scheduled:
            self._pump_is_scheduled = True
            self._loop.call_soon(self._pump)
        if self._stats_timer is None:
            self._stats_timer = self._loop.call_later(_STATS_INTERVAL, self._send_stats)

    def _send_stats(self) -> None:
        self._stats_timer = None
        if self._scheduler is not None:
            self._tell_frontends(self._stats())

    # --- what others are told, and the watch over them ----------------------------------------

    def _stats(self) -> EngineStats:
        assert self._scheduler is not None
        totals = self._scheduler.totals
        self._drain.note(monotonic(), self._scheduler.waiting.num_seqs, totals.num_completed, totals.num_prompt_tokens)
        self._bound_queue(self._scheduler)
        return replace(
            self._scheduler.stats(is_ready=self._worker is not None),
            num_dropped_from_frontends=self.frontend_channel.num_dropped,
            num_dropped_from_workers=self.worker_channel.num_dropped,
            num_dropped_by_worker=self._worker_says.num_dropped,
            num_log_lines_dropped=num_dropped_log_lines(),
            num_log_lines_dropped_by_worker=self._worker_says.num_log_lines_dropped,
            device_memory_used=self._worker_says.device_memory_used,
            device_memory_total=self._worker_says.device_memory_total,
            drained_seqs_per_second=self._drain.seqs_per_second,
            drained_tokens_per_second=self._drain.tokens_per_second,
        )

    def _bound_queue(self, scheduler: Scheduler) -> None:
        """By the rate at which it empties; and see whether it is so long that the newest go first."""
        options = self._config.scheduler
        if options.queue_patience:
            scheduler.max_turns = self._drain.turns_within(options.queue_patience, scheduler.limits.max_num_seqs)
        if options.overload_order == "newest":
            num_groups = max((each.num_groups for each in scheduler.waiting.tenants()), default=0)
            most = scheduler.max_turns or options.max_num_queued_seqs
            scheduler.waiting.newest_first = 2 * num_groups > most

    def _readiness(self) -> EngineReady | EngineNotReady:
        hello = self._hello
        if self._worker is None or hello is None:
            return EngineNotReady("no worker is connected")
        return EngineReady(
            PROTOCOL_VERSION,
            hello.model_fingerprint,
            hello.max_model_len,
            hello.vocab_size,
            hello.page_size,
            hello.num_pages,
            hello.max_num_seqs,
            hello.device,
            hello.dtype,
            self._config.scheduler.max_num_queued_seqs,
            self._config.scheduler.max_num_queued_tokens,
        )

    def _why_not(self, protocol_version: int, model_fingerprint: str) -> str:
        """Why a peer with this hello cannot take part; empty if it can."""
        if protocol_version != PROTOCOL_VERSION:
            return f"protocol version {protocol_version} meets a scheduler of version {PROTOCOL_VERSION}"
        if self._hello is not None and model_fingerprint != self._hello.model_fingerprint:
            return f"model {model_fingerprint} differs from this engine's model {self._hello.model_fingerprint}"
        return ""

    async def watch(self) -> None:
        """Send heartbeats and notice silent peers, for as long as the process runs."""
        while True:
            await asyncio.sleep(self._config.ipc.heartbeat_interval)
            now = monotonic()
            for peer in self._frontends.silent(now):
                self._drop_frontend(peer, "silent for too long")
            for peer in self._frontends.all():
                if not self.frontend_channel.send(peer, Heartbeat()):
                    self._drop_frontend(peer, "not connected any more")
            if self._worker is not None and not self.worker_channel.send(self._worker, Heartbeat()):
                self._lose_stuck_worker("it is not connected any more")
            self._check_progress(now)
            self._expire_queued(now)
            self._changed()  # what was dropped counts too, and asks for no step
            if self._trace is not None:
                self._trace.flush()

    def close(self) -> None:
        """Close everything. Worker and frontends stay, and say hello to the next scheduler."""
        if self._trace is not None:
            self._trace.close()
        self.frontend_channel.close()
        self.worker_channel.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self._context.term()


def _log_invalid_logits(batches: Iterable[TokenBatch]) -> None:
    for delta in chain.from_iterable(batch.deltas for batch in batches):
        if delta.error_code == "invalid_logits":
            log.error(
                "a sequence ended: no token could be drawn from its logits",
                request_id=delta.request_id,
                sequence_idx=delta.sequence_idx,
                reason=delta.error,
            )
