"""The scheduler process: one event loop that moves messages between frontends, `Scheduler` and the workers.

    frontends --AddRequest/AbortRequest--> scheduler.add_request/abort --+
                                                                         v
    workers  <--StepPlan------------------ scheduler.schedule() <---- _pump(), once per batch of messages
    workers  --StepResult----------------> scheduler.process()  ----> _pump(), then TokenBatch to the frontends

`Scheduler` makes all decisions; `frontends` and `workers` know which peers are connected; this file has the clocks.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from math import inf
from time import monotonic

import structlog
import zmq
from msgspec.structs import replace

from penstock.config import Config, channel_keys
from penstock.core.engine.frontends import Frontends, Order
from penstock.core.engine.part import EngineParts
from penstock.core.engine.readiness import engine_ready
from penstock.core.engine.stats import stats_of
from penstock.core.engine.worker_group import WorkerGroup
from penstock.core.scheduling.part import check_options
from penstock.core.scheduling.reasons import late_reasons, list_requests
from penstock.core.scheduling.scheduler import Refusal, ScheduledStep, Scheduler, UnexpectedResultError
from penstock.core.scheduling.suspects import Culprits, suspect_ids
from penstock.core.scheduling.trials import ENDS_WORKERS
from penstock.ipc import faults
from penstock.ipc.channel import PeerId
from penstock.ipc.codec import MalformedMessage, unpack_int32
from penstock.ipc.curve import Doorkeeper
from penstock.ipc.messages import (
    AbortRequest,
    AddRequest,
    DrainEngine,
    EngineNotReady,
    EngineReady,
    FrontendHello,
    Heartbeat,
    ListRequests,
    Message,
    NoteCulprit,
    PauseRequest,
    ProfileSteps,
    RequestList,
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

STATS_INTERVAL = 0.2
"""Shortest time in seconds between two EngineStats: fresh enough to watch, rare enough to cost nothing."""

LONG_WAIT_SECONDS, _MAX_LATE = 5.0, 32
"""Seconds without a row after which the reason is noted, once per request, and most requests noted per heartbeat."""

MAX_FINISH_SECONDS = 10.0
"""Most time for what parts do before the process ends, such as writing pages."""


class Engine:
    """One scheduler, its workers and its frontends. Lives in a running event loop until `close()`."""

    def __init__(
        self,
        config: Config,
        on_hung_worker: Callable[[int], None] = lambda pid: None,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            config: with the addresses of this engine.
            on_hung_worker: gets the process id of a worker that no longer answers.
            on_restart: called when the engine has been drained and should be restarted.

        Raises:
            ConfigError: if what options name, like a policy or the key file, does not exist.
        """
        self.config = config
        check_options(config)  # fail now rather than when the first worker comes
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.scheduler: Scheduler | None = None  # created at the first workers' hello, which has the sizes
        self._progress_at = 0.0  # time of the last result, or of the first plan after an idle time
        self._pump_is_scheduled = False
        self._is_draining = False
        self._on_restart = on_restart
        self._restarts = False  # when it is drained
        self._start_id = secrets.token_hex(8)
        self._culprits = Culprits()
        self._stats_timer: asyncio.TimerHandle | None = None
        self._wake_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        keys = channel_keys(config)
        self._doorkeeper = None if keys is None else Doorkeeper(self.context, keys)
        self.frontends = Frontends(self.context, config, keys, self)
        self.workers = WorkerGroup(self.context, config, keys, self, on_hung_worker)
        self.parts = EngineParts(self)

    # --- frontends --------------------------------------------------------------------------

    def on_frontend(self, peer: PeerId, hello: FrontendHello) -> None:
        """A frontend has said hello: send it the statistics soon."""
        for on_frontend in self.parts.on_frontend:
            on_frontend(peer, hello)
        self.changed()

    def on_frontend_gone(self, peer: PeerId) -> int:
        """Abort all requests of a frontend; return how many it had."""
        self.changed()
        for on_frontend_gone in self.parts.on_frontend_gone:
            on_frontend_gone(peer)
        return self.scheduler.abort_owner(peer, monotonic()) if self.scheduler is not None else 0

    def on_order(self, peer: PeerId, order: Order | Message) -> None:
        """Carry out an order of a frontend."""
        match order:
            case AddRequest():
                self._on_add_request(peer, order)
            case ResetPrefixCache():
                for on_cache_reset in self.parts.on_cache_reset:
                    on_cache_reset()
                num_pages = self.scheduler.reset_prefix_cache() if self.scheduler is not None else 0
                log.info("prefix cache reset", freed_pages=num_pages)
                self.changed()
            case ProfileSteps():
                self.workers.send(order)
            case DrainEngine():
                self.drain(order)
            case NoteCulprit():
                token_ids = unpack_int32(order.prompt_token_ids)
                self._culprits.note(token_ids, order.sampling, monotonic())
            case ListRequests():
                if self.scheduler is None:
                    self.frontends.tell(peer, RequestList(order.number, (), False, 0, 0, 0))
                else:
                    self.frontends.tell(peer, list_requests(self.scheduler, order, monotonic()))
            case AbortRequest() | PauseRequest() | ResumeRequest():
                self._steer(peer, order)
            case _ if (take := self.parts.order.get(type(order))) is not None:
                take(peer, order)
            case _:
                raise MalformedMessage(f"this engine has no part for {type(order).__name__}")

    def drain(self, order: DrainEngine) -> None:
        """Stop or resume taking new requests; tell all frontends."""
        if (order.is_draining, order.restarts) != (self._is_draining, self._restarts):
            log.info("draining" if order.is_draining else "draining ended", restarts=order.restarts)
        self._is_draining, self._restarts = order.is_draining, order.is_draining and order.restarts
        self.frontends.tell_all(self.readiness())
        self.changed()

    @property
    def is_drained(self) -> bool:
        """Whether the engine is draining and has nothing left to do."""
        scheduler = self.scheduler
        is_idle = scheduler is None or not (scheduler.requests or scheduler.in_flight)
        return self._is_draining and is_idle and self.parts.are_idle

    def _on_add_request(self, peer: PeerId, request: AddRequest) -> None:
        now = monotonic()
        if self.scheduler is None:
            refusal: Refusal | None = Refusal("internal", "no worker has connected yet")
        elif (
            self._culprits.known
            and not request.images
            and self._culprits.knows(request.prompt_token_ids, request.sampling, now)
        ):
            refusal = Refusal("ends_workers", ENDS_WORKERS)
        else:
            refusal = self.scheduler.add_request(request, peer, now)
        for on_request in self.parts.on_request:
            on_request(request, refusal)
        if refusal is None:
            self.changed()
            return
        deltas = [
            SequenceDelta(request.request_id, i, (), "error", error=refusal.reason, error_code=refusal.code)
            for i in range(request.n)
        ]
        self._tell(peer, deltas)

    def _steer(self, peer: PeerId, order: AbortRequest | PauseRequest | ResumeRequest) -> None:
        scheduler = self.scheduler
        request = scheduler.requests.get(order.request_id) if scheduler is not None else None
        if scheduler is None or request is None:  # it has ended in the meantime
            for on_late in self.parts.on_late:
                on_late(order, peer)
            return
        if request.owner != peer:
            raise MalformedMessage("the request is another frontend's")
        for on_steer in self.parts.on_steer:
            on_steer(order)
        match order:
            case AbortRequest():
                scheduler.abort(order.request_id, order.sequence_idx, monotonic())
                self._tell_bills(scheduler)
            case PauseRequest():
                scheduler.pause(order.request_id, monotonic())
            case ResumeRequest():
                scheduler.resume(order.request_id)
        self.changed()

    def _tell_bills(self, scheduler: Scheduler) -> None:
        for owner, deltas in scheduler.accounts.take_bills().items():
            self._tell(owner, deltas)

    def _tell(self, peer: PeerId, deltas: Sequence[SequenceDelta]) -> None:
        for on_deltas in self.parts.on_deltas:
            on_deltas(deltas)
        self.frontends.tell(peer, TokenBatch(0, tuple(deltas)))

    # --- workers ----------------------------------------------------------------------------

    def on_group_ready(self, hello: WorkerHello, *, has_died: bool) -> None:
        """Workers are there: the first ones, new ones, or the same ones with empty rows."""
        if self.scheduler is None:
            self.scheduler = Scheduler.for_worker(self.config, hello)
            self._tell_of_new_pages()
        else:
            self._reset_scheduler(self.scheduler, hello, has_died=has_died)
        for on_workers in self.parts.on_workers:
            on_workers(hello)
        self.on_group_changed()

    def on_group_changed(self) -> None:
        """Workers have come, or some are missing: tell the frontends whether there is a whole group."""
        self.frontends.tell_all(self.readiness())
        self.changed()

    def on_group_lost(self, reason: str, *, is_out_of_memory: bool) -> None:
        """The workers are gone: the next ones recompute what these had in flight."""
        log.error("worker lost", reason=reason)
        scheduler, hello = self.scheduler, self.workers.hello
        assert scheduler is not None
        assert hello is not None
        is_cut = is_out_of_memory and scheduler.step_size.cut(scheduler.in_flight)
        self._reset_scheduler(scheduler, hello, has_died=not is_cut)
        if is_cut:
            limits = scheduler.limits
            log.warning("step size reduced", rows=limits.max_num_seqs, tokens=limits.max_num_batched_tokens)
        self.on_group_changed()

    def _reset_scheduler(self, scheduler: Scheduler, hello: WorkerHello, *, has_died: bool) -> None:
        for on_workers_lost in self.parts.on_workers_lost:
            on_workers_lost()
        requests = dict(scheduler.requests)
        for owner, deltas in scheduler.reset_worker(hello, has_died=has_died, now=monotonic()).items():
            for delta in deltas:
                culprit = requests[delta.request_id]
                if delta.error_code == "ends_workers" and not culprit.images:  # its tokens do not identify its images
                    self._culprits.note(culprit.prompt_token_ids, culprit.sampling, monotonic())
                log.error("sequence ended", request_id=delta.request_id, code=delta.error_code, reason=delta.error)
            self._tell(owner, deltas)
        self._tell_bills(scheduler)
        self._tell_of_new_pages()
        if num_suspects := len(scheduler.suspects):
            log.info("bisecting suspects", num_suspects=num_suspects)

    def _tell_of_new_pages(self) -> None:
        for on_new_pages in self.parts.on_new_pages:
            on_new_pages()

    def on_step_result(self, result: StepResult) -> None:
        """A step has been computed: plan the next one, then send its tokens to the frontends."""
        scheduler = self.scheduler
        assert scheduler is not None
        in_flight = scheduler.in_flight
        oldest = in_flight[0].step_id if in_flight else scheduler.totals.num_steps
        if result.step_id < oldest:
            return  # the plan is older than the worker's last hello
        self._progress_at = received = monotonic()
        try:
            output = scheduler.process(result, received)
        except UnexpectedResultError as error:
            self.workers.lose_stuck(f"its result is invalid: {error}")
            return
        if result.row_errors:
            _log_invalid_logits(output.values())
        for take_errors in scheduler.parts.take_errors:
            for event, fields in take_errors():
                log.error(event, **fields)
        for returned in self.parts.returned:
            returned(result, output.values(), received)
        _before_tokens()
        self._pump()  # workers first: an idle device costs more than a client that waits
        for owner, batch in output.items():
            self.frontends.tell(owner, batch)
        if scheduler.accounts.bills:
            self._tell_bills(scheduler)
        self.changed()

    def on_answer(self, rank: WorkerHello, message: Message) -> None:
        """The workers have answered, or reported something, that is a part's: requests may go on, or fail."""
        if (answered := self.parts.answered.get(type(message))) is not None:
            answered(rank, message)
        scheduler = self.scheduler
        if scheduler is not None and type(message) in scheduler.parts.answered:
            if not scheduler.in_flight:  # during a trial no step is planned: that is the workers' progress
                self._progress_at = monotonic()
            for on_made in self.parts.on_made:
                on_made(message)
            for owner, deltas in scheduler.answered(message).items():
                self._tell(owner, deltas)
        self.changed()

    # --- steps ------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send plans until the pipeline is full or there is nothing left to compute."""
        self._pump_is_scheduled = False
        scheduler, parts = self.scheduler, self.parts
        for send in parts.send:
            send()
        if scheduler is None or not self.workers.is_ready:
            return
        if not self._send(scheduler, before_plan=True) or not self._send(scheduler, before_plan=False):
            return
        while scheduler.can_schedule:
            started = monotonic()
            if not scheduler.in_flight and not scheduler.is_on_trial:
                self._progress_at = started
            step = scheduler.schedule(started, with_record=parts.want_records)
            for send in parts.send:
                send()
            if scheduler.ended:
                for owner, deltas in scheduler.take_ended().items():
                    self._tell(owner, deltas)
            if not self._send(scheduler, before_plan=True):
                return
            if step is not None and not self._send_plan(step, started):
                return
            if not self._send(scheduler, before_plan=False):
                return
            if step is None:
                self._wake_at(scheduler.wakes_at)
                return
            _after_plan()

    def _send_plan(self, step: ScheduledStep, started: float) -> bool:
        """Send a step that was planned since `started`; False if there is no worker any more."""
        for planned in self.parts.planned:
            planned(step, started)
        _before_plan()
        return self.workers.send(step.plan)

    def _send(self, scheduler: Scheduler, *, before_plan: bool) -> bool:
        """Send what parts have for workers; False if there is no worker any more."""
        return all(map(self.workers.send, scheduler.take_messages(before_plan=before_plan)))

    def _wake_at(self, when: float) -> None:
        """Plan again at time `when` unless something happens first; never if it is infinite."""
        if self._wake_timer is not None:
            self._wake_timer.cancel()
            self._wake_timer = None
        if when < inf:  # plus a margin: rounding may fire timers early
            self._wake_timer = self._loop.call_later(max(0.0, when - monotonic()) + 0.001, self._pump)

    def changed(self) -> None:
        """There may be work, and the counters have changed: handle both once for all messages of this turn."""
        if not self._pump_is_scheduled:
            self._pump_is_scheduled = True
            self._loop.call_soon(self._pump)
        for changed in self.parts.changed:
            changed()
        if self._stats_timer is None:
            self._stats_timer = self._loop.call_later(STATS_INTERVAL, self._send_stats)

    def _send_stats(self) -> None:
        self._stats_timer = None
        if self.scheduler is not None:
            self.scheduler.bound_queue(monotonic())
            own = self.scheduler, self.workers, self.frontends, self.parts
            self.frontends.tell_all(stats_of(*own, is_draining=self._is_draining))

    # --- reports to peers, and the watch over them --------------------------------------------

    def readiness(self) -> EngineReady | EngineNotReady:
        """Return whether there is a worker, and its sizes."""
        hello = self.workers.hello
        if hello is None or not self.workers.is_ready:
            at = self.scheduler
            suspects = () if at is None else suspect_ids(at.suspects, at.requests.values(), at.trials, at.parts)
            return EngineNotReady("no worker is connected", suspects, self._is_draining)
        ready = engine_ready(hello, self.config.scheduler)
        return self.parts.facts(replace(ready, is_draining=self._is_draining, start_id=self._start_id))

    def why_not(self, protocol_version: int, model_fingerprint: str) -> str:
        """Return why a frontend with this hello is refused; empty if it is accepted."""
        return self.workers.why_not(protocol_version, model_fingerprint)

    async def watch(self) -> None:
        """Send heartbeats and notice silent peers, for as long as the process runs."""
        while True:
            await asyncio.sleep(self.config.ipc.heartbeat_interval)
            now = monotonic()
            self.frontends.beat(now)
            self.workers.send(Heartbeat())
            if self.scheduler is not None:
                self.workers.check_progress(self.scheduler, now - self._progress_at)
                for owner, deltas in self.scheduler.expire_queued(now).items():
                    self._tell(owner, deltas)
                if self.scheduler.waiting.num_seqs:
                    for request, reason in late_reasons(self.scheduler, now, LONG_WAIT_SECONDS, _MAX_LATE).items():
                        log.info("request waiting long", request_id=request.request_id, reason=reason)
            for beat in self.parts.beat:
                beat(now)
            if self._restarts and self.is_drained:
                self._restarts = False
                self._on_restart()
            self.changed()  # dropped messages count too, even though they cause no step

    async def finish(self) -> None:
        """Wait until the parts have done what must outlive the process, but at most `MAX_FINISH_SECONDS`."""
        deadline = monotonic() + MAX_FINISH_SECONDS
        while (scheduler := self.scheduler) is not None and self.workers.is_ready:
            if not scheduler.parts.num_unfinished or monotonic() > deadline:
                return
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Close everything. Worker and frontends keep running, and say hello to the next scheduler."""
        self._wake_at(inf)
        if self._stats_timer is not None:
            self._stats_timer.cancel()
        for close in self.parts.close:
            close()
        self.frontends.channel.close()
        self.workers.channel.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self.context.term()


def _log_invalid_logits(batches: Iterable[TokenBatch]) -> None:
    for delta in chain.from_iterable(batch.deltas for batch in batches):
        if delta.error_code == "invalid_logits":
            log.error(
                "sequence ended: invalid logits",
                request_id=delta.request_id,
                sequence_idx=delta.sequence_idx,
                reason=delta.error,
            )
