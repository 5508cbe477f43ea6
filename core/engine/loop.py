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
from penstock.core.engine.cache_news import CacheNews
from penstock.core.engine.expert_load import ExpertCounts
from penstock.core.engine.frontends import Frontends, Order
from penstock.core.engine.observers import Observers
from penstock.core.engine.readiness import engine_ready
from penstock.core.engine.roles import Roles
from penstock.core.engine.stats import stats_of
from penstock.core.engine.worker_group import WorkerGroup
from penstock.core.policies.registry import make_policy
from penstock.core.scheduling.orders import has_orders, take_orders
from penstock.core.scheduling.reasons import late_reasons, list_requests
from penstock.core.scheduling.scheduler import Refusal, Scheduler, UnexpectedResultError
from penstock.core.scheduling.suspects import Culprits, suspect_ids
from penstock.core.scheduling.trials import ENDS_WORKERS
from penstock.ipc import faults
from penstock.ipc.channel import PeerId
from penstock.ipc.codec import MalformedMessage, unpack_int32
from penstock.ipc.curve import Doorkeeper
from penstock.ipc.messages import (
    AbortRequest,
    AddRequest,
    DiskContents,
    DrainEngine,
    EngineNotReady,
    EngineReady,
    ExpertTokens,
    FrontendHello,
    GrammarPrepared,
    HandoverTaken,
    Heartbeat,
    ImageEncoded,
    KVLoaded,
    KVReceived,
    KVStored,
    ListCache,
    ListPages,
    ListPrefixes,
    ListRequests,
    NoteCulprit,
    PauseRequest,
    ProfileSteps,
    RequestList,
    ResetPrefixCache,
    ResumeRequest,
    SequenceDelta,
    SetRole,
    ShowLife,
    StepResult,
    TokenBatch,
    WatchSteps,
    WorkerHello,
)

log = structlog.get_logger()

_before_plan, _after_plan = faults.point("scheduler.plan"), faults.point("scheduler.planned")
_before_tokens = faults.point("scheduler.tokens")

STATS_INTERVAL = 0.2
"""Shortest time in seconds between two EngineStats: fresh enough to watch, rare enough to cost nothing."""

LONG_WAIT_SECONDS, _MAX_LATE = 5.0, 32
"""Seconds without a row after which the reason is noted, once per request, and most requests noted per heartbeat."""

MAX_WRITE_SECONDS = 10.0
"""Most time to write the remaining KV pages before the process ends."""


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
            ConfigError: if the policy or the key file does not exist.
        """
        self._config = config
        make_policy(config.scheduler.scheduling_policy)  # fail now rather than when the first worker comes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._scheduler: Scheduler | None = None  # created at the first workers' hello, which has the sizes
        self._progress_at = 0.0  # time of the last result, or of the first plan after an idle time
        self._pump_is_scheduled = False
        self._is_draining = False
        self._on_restart = on_restart
        self._restarts = False  # when it is drained
        self._start_id = secrets.token_hex(8)
        self._culprits = Culprits()
        self._experts: ExpertCounts | None = None  # until ranks report some
        self._stats_timer: asyncio.TimerHandle | None = None
        self._wake_timer: asyncio.TimerHandle | None = None
        self._cache_news: CacheNews | None = None  # until a frontend subscribes
        self._loop = asyncio.get_running_loop()
        keys = channel_keys(config)
        self._doorkeeper = None if keys is None else Doorkeeper(self._context, keys)
        self.frontends = Frontends(self._context, config, keys, self)
        self._observers = Observers(config, self.frontends.channel)
        self.workers = WorkerGroup(self._context, config, keys, self, on_hung_worker)
        self._roles = Roles(self._context, config, keys, self.workers.send, self._changed)

    # --- frontends --------------------------------------------------------------------------

    def on_frontend(self, peer: PeerId, hello: FrontendHello) -> None:
        """A frontend has said hello: send it the statistics soon."""
        if hello.wants_cache_events:
            if self._cache_news is None:
                self._cache_news = CacheNews(self.frontends.channel)
                self._follow_cache()
            self._cache_news.add(peer)
        self._changed()

    def on_frontend_gone(self, peer: PeerId) -> int:
        """Abort all requests of a frontend; return how many it had."""
        self._changed()
        if self._cache_news is not None:
            self._cache_news.remove(peer)
        self._observers.on_frontend_gone(peer, self._scheduler)
        return self._scheduler.abort_owner(peer, monotonic()) if self._scheduler is not None else 0

    def on_order(self, peer: PeerId, order: Order) -> None:
        """Carry out an order of a frontend."""
        match order:
            case AddRequest():
                self._on_add_request(peer, order)
            case ResetPrefixCache():
                self._observers.on_reset()
                num_pages = self._scheduler.reset_prefix_cache() if self._scheduler is not None else 0
                log.info("prefix cache reset", freed_pages=num_pages)
                self._changed()
            case ProfileSteps():
                self.workers.send(order)
            case DrainEngine():
                self.drain(order)
            case NoteCulprit():
                token_ids = unpack_int32(order.prompt_token_ids)
                self._culprits.note(token_ids, order.sampling, monotonic())
            case ListCache():
                if self._cache_news is not None:
                    self._cache_news.tell_all_of_it(peer)
            case ListRequests():
                if self._scheduler is None:
                    self.frontends.tell(peer, RequestList(order.number, (), False, 0, 0, 0))
                else:
                    self.frontends.tell(peer, list_requests(self._scheduler, order, monotonic()))
            case WatchSteps() | ListPages() | ListPrefixes() | ShowLife():
                self._observers.on_watcher(peer, order, lambda: self._scheduler)
            case HandoverTaken():
                self.frontends.tell(peer, self._roles.taken(order, peer))
            case SetRole():
                if self._roles.change(order.role):
                    self.frontends.tell_all(self.readiness())
            case _:
                self._steer(peer, order)

    def drain(self, order: DrainEngine) -> None:
        """Stop or resume taking new requests; tell all frontends."""
        if (order.is_draining, order.restarts) != (self._is_draining, self._restarts):
            log.info("draining" if order.is_draining else "draining ended", restarts=order.restarts)
        self._is_draining, self._restarts = order.is_draining, order.is_draining and order.restarts
        self.frontends.tell_all(self.readiness())
        self._changed()

    @property
    def is_drained(self) -> bool:
        """Whether the engine is draining and has nothing left to do."""
        scheduler = self._scheduler
        is_idle = scheduler is None or not (scheduler.requests or scheduler.in_flight)
        return self._is_draining and is_idle and self._roles.is_idle

    def _on_add_request(self, peer: PeerId, request: AddRequest) -> None:
        now = monotonic()
        if request.prefill_at:
            self._roles.connect(request.prefill_at)
        if self._scheduler is None:
            refusal: Refusal | None = Refusal("internal", "no worker has connected yet")
        elif (
            self._culprits.known
            and not request.images
            and self._culprits.knows(request.prompt_token_ids, request.sampling, now)
        ):
            refusal = Refusal("ends_workers", ENDS_WORKERS)
        else:
            refusal = self._scheduler.add_request(request, peer, now)
        if self._observers.are_there:
            self._observers.on_request(request, self._scheduler, refusal)
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
        if scheduler is None or request is None:  # it has ended in the meantime
            self._roles.leave(order.request_id, peer)
            return
        if request.owner != peer:
            raise MalformedMessage("the request is another frontend's")
        self._observers.on_steer(order, scheduler)
        match order:
            case AbortRequest():
                scheduler.abort(order.request_id, order.sequence_idx, monotonic())
                self._tell_bills(scheduler)
            case PauseRequest():
                scheduler.pause(order.request_id, monotonic())
            case ResumeRequest():
                scheduler.resume(order.request_id)
        self._changed()

    def _tell_bills(self, scheduler: Scheduler) -> None:
        for owner, deltas in scheduler.accounts.take_bills().items():
            self._tell(owner, deltas)

    def _tell(self, peer: PeerId, deltas: Sequence[SequenceDelta]) -> None:
        self._observers.on_deltas(deltas, self._scheduler)
        self.frontends.tell(peer, TokenBatch(0, tuple(deltas)))

    # --- workers ----------------------------------------------------------------------------

    def on_group_ready(self, hello: WorkerHello, *, has_died: bool) -> None:
        """Workers are there: the first ones, new ones, or the same ones with empty rows."""
        if self._config.scheduler.preemption == "swap" and not hello.num_host_pages:
            log.warning("swap disabled", reason="the worker has no host tier (--host-kv-gib)")
        if self._scheduler is None:
            self._scheduler = Scheduler.for_worker(self._config.scheduler, hello)
        else:
            self._reset_scheduler(self._scheduler, hello, has_died=has_died)
        self._roles.begin(hello, self._scheduler.handovers)
        self._observers.on_workers(hello)
        self._follow_cache()
        self.on_group_incomplete()

    def on_group_incomplete(self) -> None:
        """Tell the frontends that there is no worker."""
        self.frontends.tell_all(self.readiness())
        self._changed()

    def on_group_lost(self, reason: str, *, is_out_of_memory: bool) -> None:
        """The workers are gone: the next ones recompute what these had in flight."""
        log.error("worker lost", reason=reason)
        scheduler, hello = self._scheduler, self.workers.hello
        assert scheduler is not None
        assert hello is not None
        is_cut = is_out_of_memory and scheduler.step_size.cut(scheduler.in_flight)
        self._reset_scheduler(scheduler, hello, has_died=not is_cut)
        if is_cut:
            limits = scheduler.limits
            log.warning("step size reduced", rows=limits.max_num_seqs, tokens=limits.max_num_batched_tokens)
        self.on_group_incomplete()

    def _reset_scheduler(self, scheduler: Scheduler, hello: WorkerHello, *, has_died: bool) -> None:
        self._observers.forget_planned()
        requests = dict(scheduler.requests)
        for owner, deltas in scheduler.reset_worker(hello, has_died=has_died, now=monotonic()).items():
            for delta in deltas:
                culprit = requests[delta.request_id]
                if delta.error_code == "ends_workers" and not culprit.images:  # its tokens do not identify its images
                    self._culprits.note(culprit.prompt_token_ids, culprit.sampling, monotonic())
                log.error("sequence ended", request_id=delta.request_id, code=delta.error_code, reason=delta.error)
            self._tell(owner, deltas)
        self._tell_bills(scheduler)
        self._follow_cache()
        self._roles.follow(scheduler.handovers)
        if num_suspects := len(scheduler.suspects):
            log.info("bisecting suspects", num_suspects=num_suspects)

    def _follow_cache(self) -> None:
        """Point the cache news at the scheduler's pages: they were replaced, or a frontend has subscribed."""
        if self._cache_news is not None and self._scheduler is not None:
            self._cache_news.follow(self._scheduler.kv, self._scheduler.limits)

    def on_step_result(self, result: StepResult) -> None:
        """A step has been computed: plan the next one, then send its tokens to the frontends."""
        scheduler = self._scheduler
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
        if result.drafter_error:
            log.error("drafter disabled", drafter=scheduler.limits.drafter, reason=result.drafter_error)
        if self._observers.are_there:
            self._observers.returned(result, list(output.values()), scheduler, received)
        _before_tokens()
        self._pump()  # workers first: an idle device costs more than a client that waits
        for owner, batch in output.items():
            self.frontends.tell(owner, batch)
        if scheduler.accounts.bills:
            self._tell_bills(scheduler)
        self._changed()

    def on_disk(self, message: KVStored | KVLoaded | DiskContents) -> None:
        """Pages have come from the disk or gone to it: requests may go on, and more pages may move."""
        scheduler = self._scheduler
        if scheduler is None or scheduler.disk is None:
            return
        if reason := scheduler.disk.answered(message):
            log.error("disk KV: writing stopped", reason=reason)
        if isinstance(message, DiskContents) and message.is_last:
            log.info("disk KV listed", pages=scheduler.disk.disk.num_cached, room_for=scheduler.disk.disk.num_places)
        self._changed()

    def on_received(self, message: KVReceived) -> None:
        """Pages from another engine are there, or are no longer written to."""
        self._roles.on_received(message)

    def on_grammar_prepared(self, message: GrammarPrepared) -> None:
        """Requests that waited for a grammar may run, or fail."""
        assert self._scheduler is not None
        self._note_making(self._scheduler)
        for owner, deltas in self._scheduler.grammar_prepared(message).items():
            self._tell(owner, deltas)
        self._changed()

    def on_image_encoded(self, message: ImageEncoded) -> None:
        """Requests that waited for an image may run, or fail."""
        assert self._scheduler is not None
        self._note_making(self._scheduler)
        self._observers.on_image(message, self._scheduler)
        for owner, deltas in self._scheduler.image_encoded(message).items():
            self._tell(owner, deltas)
        self._changed()

    def _note_making(self, scheduler: Scheduler) -> None:
        """Something was made: during a trial, when no step is planned, that is the worker's progress."""
        if not scheduler.in_flight:
            self._progress_at = monotonic()

    def on_expert_tokens(self, rank: WorkerHello, message: ExpertTokens) -> None:
        """Experts on a rank have computed tokens."""
        if self._experts is None:
            self._experts = ExpertCounts(rank.num_ranks // rank.num_stages)
        self._experts.add(rank.rank, message, monotonic())
        self._changed()

    # --- steps ------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send plans until the pipeline is full or there is nothing left to compute."""
        self._pump_is_scheduled = False
        scheduler, observers = self._scheduler, self._observers
        if scheduler is not None and scheduler.handovers is not None:
            self._roles.send_orders()
        if scheduler is None or not self.workers.is_ready:
            return
        if scheduler.handovers is not None and not self._roles.send_moves():
            return
        while scheduler.can_schedule:
            started = monotonic()
            if not scheduler.in_flight and not scheduler.is_on_trial:
                self._progress_at = started
            step = scheduler.schedule(started, with_record=observers.want_records)
            if scheduler.ended:
                for owner, deltas in scheduler.take_ended().items():
                    self._tell(owner, deltas)
            if has_orders(scheduler) and not all(map(self.workers.send, take_orders(scheduler))):
                return
            if step is None:
                self._send_moves(scheduler)
                self._wake_at(scheduler.wakes_at)
                return
            if observers.are_there:
                observers.planned(step, scheduler, started)
            _before_plan()
            if scheduler.handovers is not None and not self._roles.send_offers():
                return
            if not self.workers.send(step.plan) or not self._send_moves(scheduler):
                return
            _after_plan()

    def _send_moves(self, scheduler: Scheduler) -> bool:
        """Send the messages that move pages beside steps; False if there is no worker any more."""
        disk = scheduler.disk
        if scheduler.handovers is not None and not self._roles.send_moves():
            return False
        return disk is None or all(map(self.workers.send, disk.take_messages()))

    def _wake_at(self, when: float) -> None:
        """Plan again at time `when` unless something happens first; never if it is infinite."""
        if self._wake_timer is not None:
            self._wake_timer.cancel()
            self._wake_timer = None
        if when < inf:  # plus a margin: rounding may fire timers early
            self._wake_timer = self._loop.call_later(max(0.0, when - monotonic()) + 0.001, self._pump)

    def _changed(self) -> None:
        """There may be work, and the counters have changed: handle both once for all messages of this turn."""
        if not self._pump_is_scheduled:
            self._pump_is_scheduled = True
            self._loop.call_soon(self._pump)
        if self._cache_news is not None:
            self._cache_news.changed()
        if self._stats_timer is None:
            self._stats_timer = self._loop.call_later(STATS_INTERVAL, self._send_stats)

    def _send_stats(self) -> None:
        self._stats_timer = None
        if self._scheduler is not None:
            self._scheduler.bound_queue(monotonic())
            parts = self._scheduler, self.workers, self.frontends, self._experts, self._observers.recorder
            self.frontends.tell_all(stats_of(*parts, is_draining=self._is_draining))

    # --- reports to peers, and the watch over them --------------------------------------------

    def readiness(self) -> EngineReady | EngineNotReady:
        """Return whether there is a worker, and its sizes."""
        hello = self.workers.hello
        if hello is None or not self.workers.is_ready:
            at = self._scheduler
            suspects = () if at is None else suspect_ids(at.suspects, at.requests.values(), at.trials)
            return EngineNotReady("no worker is connected", suspects, self._is_draining)
        return replace(
            engine_ready(hello, self._config.scheduler),
            role=self._roles.role,
            kv_sources=hello.kv_sources,
            is_draining=self._is_draining,
            start_id=self._start_id,
        )

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
            if self._roles.role:
                self._roles.beat(now)
            if self._scheduler is not None:
                self.workers.check_progress(self._scheduler, now - self._progress_at)
                for owner, deltas in self._scheduler.expire_queued(now).items():
                    self._tell(owner, deltas)
                if self._scheduler.waiting.num_seqs:
                    for request, reason in late_reasons(self._scheduler, now, LONG_WAIT_SECONDS, _MAX_LATE).items():
                        log.info("request waiting long", request_id=request.request_id, reason=reason)
            if self._experts is not None and (load := self._experts.news(now)) is not None:
                self.frontends.tell_all(load)
            if self._restarts and self.is_drained:
                self._restarts = False
                self._on_restart()
            self._changed()  # dropped messages count too, even though they cause no step
            self._observers.flush()

    async def write_pages(self) -> None:
        """Wait until the noted KV pages are on the disk, but at most `MAX_WRITE_SECONDS`."""
        deadline = monotonic() + MAX_WRITE_SECONDS
        while (scheduler := self._scheduler) is not None and scheduler.disk is not None and self.workers.is_ready:
            if not scheduler.disk.num_under_way or monotonic() > deadline:
                return
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Close everything. Worker and frontends keep running, and say hello to the next scheduler."""
        self._wake_at(inf)
        if self._stats_timer is not None:
            self._stats_timer.cancel()
        if self._cache_news is not None:
            self._cache_news.close()
        self._observers.close()
        self._roles.close()
        self.frontends.channel.close()
        self.workers.channel.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self._context.term()


def _log_invalid_logits(batches: Iterable[TokenBatch]) -> None:
    for delta in chain.from_iterable(batch.deltas for batch in batches):
        if delta.error_code == "invalid_logits":
            log.error(
                "sequence ended: invalid logits",
                request_id=delta.request_id,
                sequence_idx=delta.sequence_idx,
                reason=delta.error,
            )
