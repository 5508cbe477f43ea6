"""The scheduler process: one event loop that moves messages between frontends, `Scheduler` and the workers.

    frontends --AddRequest/AbortRequest--> scheduler.add_request/abort --+
                                                                         v
    workers  <--StepPlan------------------ scheduler.schedule() <---- _pump(), once per batch of messages
    workers  --StepResult----------------> scheduler.process()  ----> _pump(), then TokenBatch to the frontends

`Scheduler` makes all decisions, and `frontends` and `workers` know who is connected; this file has the clocks.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from time import monotonic

import structlog
import zmq
from msgspec.structs import replace

from penstock.core.config import Config, SchedulerOptions, channel_keys
from penstock.core.engine.frontends import Frontends, Order
from penstock.core.engine.step_trace import StepTrace
from penstock.core.engine.worker_group import WorkerGroup
from penstock.core.scheduling.scheduler import Refusal, Scheduler, UnexpectedResultError
from penstock.core.scheduling.suspects import ENDS_WORKERS, Culprits
from penstock.core.sequences.drain_rate import DrainRate
from penstock.core.sequences.policy import make_policy
from penstock.ipc import faults
from penstock.ipc.channel import PeerId
from penstock.ipc.codec import MalformedMessage
from penstock.ipc.curve import Doorkeeper
from penstock.ipc.logs import num_dropped_log_lines
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    AddRequest,
    EngineNotReady,
    EngineReady,
    EngineStats,
    GrammarPrepared,
    Heartbeat,
    PauseRequest,
    ResetPrefixCache,
    ResumeRequest,
    SequenceDelta,
    StepResult,
    TokenBatch,
    WorkerHello,
)

log = structlog.get_logger()

_before_plan, _after_plan = faults.point("scheduler.plan"), faults.point("scheduler.planned")
_before_tokens = faults.point("scheduler.tokens")

_STATS_INTERVAL = 0.2
"""Shortest time in seconds between two EngineStats: fresh enough to watch, rare enough to cost nothing."""

STEP_SECONDS, STEP_SECONDS_PER_TOKEN = 120.0, 0.25
"""A step that takes longer than these together counts as hung. Generous: it may have to compile kernels, and a large
model on a small CPU is slow."""


class Engine:
    """One scheduler, its workers and its frontends. Lives in a running event loop until `close()`."""

    def __init__(self, config: Config, on_hung_worker: Callable[[int], None] = lambda pid: None) -> None:
        """`on_hung_worker` gets the process id of a worker that no longer answers.

        Raises:
            ConfigError: if the policy or the key file does not exist.
        """
        self._config = config
        make_policy(config.scheduler.scheduling_policy)  # fails now rather than when the first worker comes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._trace = StepTrace(config.scheduler.step_trace) if config.scheduler.step_trace else None
        self._scheduler: Scheduler | None = None  # created at the first workers' hello, which gives their sizes
        self._progress_at = 0.0  # time of the last result, or of the first plan after an idle time
        self._pump_is_scheduled = False
        self._drain = DrainRate()
        self._culprits = Culprits()
        self._stats_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        keys = channel_keys(config)
        self._doorkeeper = None if keys is None else Doorkeeper(self._context, keys)
        self.frontends = Frontends(self._context, config, keys, self)
        self.workers = WorkerGroup(self._context, config, keys, self, on_hung_worker)

    # --- frontends --------------------------------------------------------------------------

    def on_frontend(self) -> None:
        """A frontend has said hello: it soon gets the statistics."""
        self._changed()

    def on_frontend_gone(self, peer: PeerId) -> int:
        """Abort all requests of a frontend; return how many it had."""
        self._changed()
        return self._scheduler.abort_owner(peer) if self._scheduler is not None else 0

    def on_order(self, peer: PeerId, order: Order) -> None:
        """Carry out what a frontend sent."""
        match order:
            case AddRequest():
                self._on_add_request(peer, order)
            case ResetPrefixCache():
                num_pages = self._scheduler.reset_prefix_cache() if self._scheduler is not None else 0
                log.info("prefix cache reset", freed_pages=num_pages)
                self._changed()
            case _:
                self._steer(peer, order)

    def _on_add_request(self, peer: PeerId, request: AddRequest) -> None:
        now = monotonic()
        if self._scheduler is None:
            refusal: Refusal | None = Refusal("internal", "no worker has connected yet")
        elif self._culprits.known and self._culprits.knows(request.prompt_token_ids, request.sampling, now):
            refusal = Refusal("ends_workers", ENDS_WORKERS)
        else:
            refusal = self._scheduler.add_request(request, peer, now)
        if refusal is None:
            self._changed()
            return
        deltas = [
            SequenceDelta(request.request_id, i, (), "error", error=refusal.reason, error_code=refusal.code)
            for i in range(request.n)
        ]
        self._tell(peer, deltas)

    def _steer(self, peer: PeerId, order: AbortRequest | PauseRequest | ResumeRequest) -> None:
        scheduler = self._scheduler
        request = scheduler.requests.get(order.request_id) if scheduler is not None else None
        if scheduler is None or request is None:
            return  # it has ended in the meantime
        if request.owner != peer:
            raise MalformedMessage("the request is another frontend's")
        match order:
            case AbortRequest():
                scheduler.abort(order.request_id, order.sequence_idx)
            case PauseRequest():
                scheduler.pause(order.request_id)
            case ResumeRequest():
                scheduler.resume(order.request_id)
        self._changed()

    def _tell(self, peer: PeerId, deltas: Sequence[SequenceDelta]) -> None:
        self.frontends.tell(peer, TokenBatch(0, tuple(deltas)))

    # --- workers ----------------------------------------------------------------------------

    def on_group_ready(self, hello: WorkerHello, *, has_died: bool) -> None:
        """Workers are there: the first ones, new ones, or the same ones with empty rows."""
        if self._scheduler is None:
            self._scheduler = Scheduler.for_worker(self._config.scheduler, hello)
        else:
            self._reset_scheduler(self._scheduler, hello, has_died=has_died)
        self.on_group_incomplete()

    def on_group_incomplete(self) -> None:
        """Tell the frontends that there is no worker."""
        self.frontends.tell_all(self.readiness())
        self._changed()

    def on_group_lost(self, reason: str, *, is_out_of_memory: bool) -> None:
        """The next workers recompute what these had in flight."""
        log.error("worker lost; its sequences wait for the next one", reason=reason)
        scheduler, hello = self._scheduler, self.workers.hello
        assert scheduler is not None
        assert hello is not None
        is_cut = is_out_of_memory and scheduler.step_size.cut(scheduler.in_flight)
        self._reset_scheduler(scheduler, hello, has_died=not is_cut)
        if is_cut:
            limits = scheduler.limits
            log.warning("steps are smaller from now on", rows=limits.max_num_seqs, tokens=limits.max_num_batched_tokens)
        self.on_group_incomplete()

    def _reset_scheduler(self, scheduler: Scheduler, hello: WorkerHello, *, has_died: bool) -> None:
        if self._trace is not None:
            self._trace.forget_planned()
        requests = dict(scheduler.requests)
        for owner, deltas in scheduler.reset_worker(hello, has_died=has_died).items():
            for delta in deltas:
                if delta.error_code == "ends_workers":
                    culprit = requests[delta.request_id]
                    self._culprits.note(culprit.prompt_token_ids, culprit.sampling, monotonic())
                log.error("sequence ended", request_id=delta.request_id, code=delta.error_code, reason=delta.error)
            self._tell(owner, deltas)
        if num_suspects := len(scheduler.suspects):
            log.info("requests in flight when the worker died are tried in halves", num_suspects=num_suspects)

    def _check_progress(self, scheduler: Scheduler, now: float) -> None:
        """Judge workers by their results only: a heartbeat shows that a process lives, not that its device works."""
        if not scheduler.in_flight:
            if scheduler.grammars.trial is not None and now - self._progress_at > STEP_SECONDS:
                self.workers.lose_stuck(f"a grammar is not ready after {STEP_SECONDS:.0f} s")
            return
        step = scheduler.in_flight[0]
        num_tokens = step.num_tokens
        seconds = STEP_SECONDS + STEP_SECONDS_PER_TOKEN * num_tokens
        if now - self._progress_at > seconds:
            self.workers.lose_stuck(f"step {step.step_id} of {num_tokens} tokens has no result after {seconds:.0f} s")

    def on_step_result(self, result: StepResult) -> None:
        """A step has been computed: plan the next one, then send its tokens to the frontends."""
        scheduler = self._scheduler
        assert scheduler is not None
        in_flight = scheduler.in_flight
        oldest = in_flight[0].step_id if in_flight else scheduler.totals.num_steps
        if result.step_id < oldest:
            return  # for a plan that the worker got before it said hello again
        self._progress_at = received = monotonic()
        try:
            output = scheduler.process(result)
        except UnexpectedResultError as error:
            self.workers.lose_stuck(f"its result is invalid: {error}")
            return
        if result.row_errors:
            _log_invalid_logits(output.values())
        if self._trace is not None:
            process_us = (monotonic() - received) * 1e6
            self._trace.returned(result.step_id, received, process_us, result.num_forward_us, result.num_idle_us)
        _before_tokens()
        self._pump()  # workers first: an idle device costs more than a client that waits
        for owner, batch in output.items():
            self.frontends.tell(owner, batch)
        self._changed()

    def on_grammar_prepared(self, message: GrammarPrepared) -> None:
        """Requests that waited for a grammar may run, or fail."""
        assert self._scheduler is not None
        for owner, deltas in self._scheduler.grammar_prepared(message).items():
            self._tell(owner, deltas)
        self._changed()

    # --- steps ------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send plans until the pipeline is full or there is nothing left to compute."""
        self._pump_is_scheduled = False
        scheduler = self._scheduler
        if scheduler is None or not self.workers.is_ready:
            return
        while scheduler.can_schedule:
            started = monotonic()
            if not scheduler.in_flight and scheduler.grammars.trial is None:
                self._progress_at = started
            step = scheduler.schedule(started, with_record=self._trace is not None)
            if scheduler.grammars.messages and not all(map(self.workers.send, scheduler.grammars.take_messages())):
                return
            if step is None:
                return
            for seq in step.newcomers:
                if seq.request.arrived:
                    seq.queued_us = int((started - seq.request.arrived) * 1e6)
            if self._trace is not None:
                sent = monotonic()
                self._trace.planned(step.plan.step_id, step.record, (sent - started) * 1e6, sent)
            _before_plan()
            if not self.workers.send(step.plan):
                return
            _after_plan()

    def _changed(self) -> None:
        """Something may be schedulable, and the counters have changed: handled once for all messages of this turn."""
        if not self._pump_is_scheduled:
            self._pump_is_scheduled = True
            self._loop.call_soon(self._pump)
        if self._stats_timer is None:
            self._stats_timer = self._loop.call_later(_STATS_INTERVAL, self._send_stats)

    def _send_stats(self) -> None:
        self._stats_timer = None
        if self._scheduler is not None:
            self.frontends.tell_all(self._stats(self._scheduler))

    # --- what others are told, and the watch over them ----------------------------------------

    def _stats(self, scheduler: Scheduler) -> EngineStats:
        totals, says = scheduler.totals, self.workers.says()
        self._drain.note(monotonic(), scheduler.waiting.num_seqs, totals.num_completed, totals.num_prompt_tokens)
        self._bound_queue(scheduler)
        return replace(
            scheduler.stats(is_ready=self.workers.is_ready),
            num_dropped_from_frontends=self.frontends.channel.num_dropped,
            num_dropped_from_workers=self.workers.channel.num_dropped,
            num_dropped_by_worker=says.num_dropped,
            num_log_lines_dropped=num_dropped_log_lines(),
            num_log_lines_dropped_by_worker=says.num_log_lines_dropped,
            device_memory_used=says.device_memory_used,
            device_memory_total=says.device_memory_total,
            drained_seqs_per_second=self._drain.seqs_per_second,
            drained_tokens_per_second=self._drain.tokens_per_second,
        )

    def _bound_queue(self, scheduler: Scheduler) -> None:
        """Set the queue's limit by the rate at which it empties, and whether the newest requests go first."""
        options = self._config.scheduler
        if options.queue_patience:
            scheduler.max_turns = self._drain.turns_within(options.queue_patience, scheduler.limits.max_num_seqs)
        if options.overload_order == "newest":
            num_groups = max((each.num_groups for each in scheduler.waiting.tenants()), default=0)
            most = scheduler.max_turns or options.max_num_queued_seqs
            scheduler.waiting.newest_first = 2 * num_groups > most

    def readiness(self) -> EngineReady | EngineNotReady:
        """Return whether there is a worker, and how large it is."""
        hello = self.workers.hello
        if hello is None or not self.workers.is_ready:
            return EngineNotReady("no worker is connected")
        return engine_ready(hello, self._config.scheduler)

    def why_not(self, protocol_version: int, model_fingerprint: str) -> str:
        """Return why a frontend with this hello is refused; empty if it is accepted."""
        return self.workers.why_not(protocol_version, model_fingerprint)

    async def watch(self) -> None:
        """Send heartbeats and notice silent peers, for as long as the process runs."""
        while True:
            await asyncio.sleep(self._config.ipc.heartbeat_interval)
            now = monotonic()
            self.frontends.beat(now)
            self.workers.send(Heartbeat())
            if self._scheduler is not None:
                if self.workers.is_ready:
                    self._check_progress(self._scheduler, now)
                for owner, deltas in self._scheduler.expire_queued(now).items():
                    self._tell(owner, deltas)
            self._changed()  # dropped messages count too, although they cause no step
            if self._trace is not None:
                self._trace.flush()

    def close(self) -> None:
        """Close everything. Worker and frontends keep running, and say hello to the next scheduler."""
        if self._trace is not None:
            self._trace.close()
        self.frontends.channel.close()
        self.workers.channel.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self._context.term()


def _log_invalid_logits(batches: Iterable[TokenBatch]) -> None:
    for delta in chain.from_iterable(batch.deltas for batch in batches):
        if delta.error_code == "invalid_logits":
            log.error(
                "a sequence ended: no token could be sampled from its logits",
                request_id=delta.request_id,
                sequence_idx=delta.sequence_idx,
                reason=delta.error,
            )


def engine_ready(hello: WorkerHello, options: SchedulerOptions) -> EngineReady:
    """Return what frontends are told about an engine whose workers sent this hello."""
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
        options.max_num_queued_seqs,
        options.max_num_queued_tokens,
        hello.kernels,
    )
