"""The scheduler: decides what each step computes, and what its results mean. Pure: no IO, no clock, no tensor.

    add_request / abort ──▶ waiting ──schedule()──▶ running ──process()──▶ finished
                               ▲                       │
                               └────── preempted ◀─────┘

One rule: each step computes the next chunk of the tokens that are known, or will be known when the steps in flight
return, but are not computed yet. Up to `pipeline_depth` steps are planned ahead of the results, and one more for each
further stage of a pipeline.
"""

from collections import deque
from collections.abc import Sequence as ListOf
from math import inf

from penstock.config import Config
from penstock.core.kv.kv_pages import Start
from penstock.core.kv.page_groups import make_pages
from penstock.core.kv.snapshots import SnapshotTotals
from penstock.core.scheduling.accounts import Accounts
from penstock.core.scheduling.admissions import Admissions
from penstock.core.scheduling.launches import Launches
from penstock.core.scheduling.part import Ending, Parts
from penstock.core.scheduling.reasons import Reasons
from penstock.core.scheduling.results import Deltas, Settling, UnexpectedResultError, checked_tokens, draft_outcome
from penstock.core.scheduling.running_set import RunningSet
from penstock.core.scheduling.stats import Totals, engine_stats
from penstock.core.scheduling.step_record import (
    MAX_WAITING_SHOWN,
    Admission,
    Blocked,
    Preemption,
    ScheduledStep,
    StepRecord,
    make_record,
    waiting_reasons,
)
from penstock.core.scheduling.suspects import Suspects, bring
from penstock.core.scheduling.trials import ENDS_WORKERS, Trials
from penstock.core.scheduling.yielding import Yielding
from penstock.core.sequences.intake import QueueBound, Refusal, check_request
from penstock.core.sequences.limits import WorkerLimits
from penstock.core.sequences.sequence import Owner, Request, Sequence
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.core.steps.drafts import DraftOutcome, DraftRoom
from penstock.core.steps.plan_builder import DecodeBatch, InFlightStep, PlanBuilder
from penstock.core.steps.prefill_pace import PrefillPace, Room, chunk_for_stages
from penstock.core.steps.step_size import StepSize
from penstock.ipc.messages import (
    AddRequest,
    EngineStats,
    ErrorCode,
    Message,
    StepPlan,
    StepResult,
    TokenBatch,
    WorkerHello,
)

__all__ = ["Deltas", "Refusal", "ScheduledStep", "Scheduler", "UnexpectedResultError"]


class Scheduler:
    """Admission, batching, pages, prefix reuse and preemption for one worker group."""

    def __init__(self, config: Config, limits: WorkerLimits) -> None:
        self.config = config
        self.options = options = config.scheduler
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.totals = Totals()
        self.suspects = Suspects()
        self.accounts = Accounts(self.totals)
        self.step_size = StepSize(options)
        self.queue_bound = QueueBound(options, self.waiting)
        self.ended: Deltas = {}  # ends of requests that waited, until `take_ended`
        self.pace = PrefillPace(options.max_prefill_ms)
        self.snapshot_totals = SnapshotTotals()
        self.outcome: DraftOutcome | None = None  # of the step that has returned last; None: it had no drafts
        self.trials = Trials()
        self.parts = Parts(())
        self._set_limits(limits)

    @classmethod
    def for_worker(cls, config: Config, hello: WorkerHello) -> "Scheduler":
        """Return a scheduler for the first worker that said hello."""
        return cls(config, WorkerLimits.of(config.scheduler, hello))

    def _set_limits(self, limits: WorkerLimits) -> None:
        self.limits, num_stages = limits, limits.num_stages
        self.max_in_flight = num_stages + self.options.pipeline_depth
        """Most plans without a result: one in each stage, and those that wait for the first stage."""
        self.kv = make_pages(
            limits.num_pages, limits.page_size, limits.window_groups,
            enable_prefix_caching=self.options.enable_prefix_caching and not limits.texts_are_whole,
            has_states=limits.has_states, snapshots=limits.snapshots(self.snapshot_totals),
        )  # fmt: skip
        self.running = RunningSet(limits.max_num_seqs, num_stages)
        self.in_flight: deque[InFlightStep] = deque()
        self.parts = Parts.of(self, self.parts)
        self.policy = self.parts.policy
        self.accounts.page_bytes = limits.page_bytes + limits.draft_page_bytes
        self._admissions = Admissions(
            self.waiting, self.running, self.kv, self.totals, self.suspects, self.accounts, self.parts
        )
        self._yielding = Yielding(self.waiting, self.running, self.parts, self._admissions, self.totals, self._vacate)
        self._launches = Launches(self.running, self.kv, self.parts, self._yielding.preempt, self.totals)
        self._blocked_by = ""  # why the head of the queue waits, as of the last step
        self.settling = Settling(self.kv, self.running, self.totals, self.accounts, self._remove)

    # --- requests ---------------------------------------------------------------------------

    def add_request(self, message: AddRequest, owner: Owner, now: float = 0.0) -> Refusal | None:
        """Accept a request: all its sequences wait. A refusal leaves everything unchanged."""
        if message.request_id in self.requests:
            return Refusal("internal", f"request id {message.request_id!r} is in use by a live request")
        max_turns = self.queue_bound.turns_allowed() if self.waiting.num_seqs else 0
        if refusal := check_request(message, self.limits, self.waiting, self.options, max_turns):
            return refusal
        request = Request(message, owner, self.limits.max_sequence_len, now)
        request.namespace = self.limits.namespace(message.cache_salt, request.num_prompt_tokens, message.adapter)
        if refusal := self.parts.refusal(request):
            return refusal
        if now:
            self.kv.now = now
        for arriving in self.parts.arriving:
            if refusal := arriving(request, now):
                return refusal
        if message.progress:
            self.queue_bound.requeued(len(message.progress))
        if message.num_deaths:
            bring(request, self.suspects, self.trials, self.parts)
        self.requests[message.request_id] = request
        self.waiting.add_request(request)
        for arrived in self.parts.arrived:
            arrived(request)
        return None

    def abort(self, request_id: str, sequence_idx: int = -1, now: float | None = None) -> None:
        """Drop a request, or one sequence of it; its last deltas will be in `accounts.bills`. Unknown ids are ignored.

        `now`: by the clock of `schedule`; None: the time of the latest call that gave it.
        """
        self._set_now(now)
        request = self.requests.get(request_id)
        for seq in [] if request is None else [*request.running, *request.waiting]:
            if sequence_idx in (-1, seq.sequence_idx):
                self.totals.num_completed += sequence_idx >= 0 and seq.row >= 0  # the frontend found a stop string
                self._remove(seq)
                self.accounts.abort(seq, self.kv.now)

    def pause(self, request_id: str, now: float | None = None) -> None:
        """Take a request out of the batch until `resume`: only its tokens are kept. Unknown ids are ignored."""
        self._set_now(now)
        request = self.requests.get(request_id)
        if request is not None and not request.is_paused:
            for seq in list(request.running):
                self._vacate(seq, False)
                self._admissions.sequence_left()
            self.waiting.pause(request)
            self._let_go(request)

    def resume(self, request_id: str) -> None:
        """Continue a paused request, after those that are waiting already. Unknown ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None and request.is_paused:
            self.waiting.resume(request)
            for waits in self.parts.waits:
                waits(request)

    def expire_queued(self, now: float) -> Deltas:
        """End the requests that have waited for their first row for longer than `queue_timeout`; return their deltas.

        Requests that have had a row do not expire, nor do requests of an earlier scheduler. Those that parts refuse to
        keep waiting end as well.
        """
        deltas: Deltas = {}
        self._set_now(now)
        for expire in self.parts.expire:
            for ending in expire():
                self._end(*ending, deltas)
        seconds = self.options.queue_timeout
        longest = seconds or inf
        late = [
            each for each in self.requests.values() if each.arrived and now - each.arrived > longest and each.is_new
        ]
        reasons = self.reasons().of_requests(dict.fromkeys(late)) if late else {}
        for request in late:
            error = f"the request waited in the queue for more than {seconds:g} s; {reasons[request]}"
            self._end(request, error, "queue_timeout", deltas)
        return deltas

    def abort_owner(self, owner: Owner, now: float | None = None) -> int:
        """Drop all requests of an owner that is gone; return how many it had."""
        self._set_now(now)
        request_ids = [request.request_id for request in self.requests.values() if request.owner == owner]
        for request_id in request_ids:
            self.abort(request_id)
        self.accounts.forget_owner(owner)
        for leave_owner in self.parts.leave_owner:
            leave_owner(owner)
        return len(request_ids)

    def reset_worker(
        self, hello: WorkerHello | None = None, *, has_died: bool = True, now: float | None = None
    ) -> Deltas:
        """The worker is gone, or another one has come: everything that the old one held is lost.

        Running sequences wait again at their places in the order and will be recomputed from their tokens. Steps
        in flight are forgotten, and the prefix cache is empty. With a hello, the new worker's sizes apply. If the
        worker `has_died`, the requests that it had in flight are suspected. Returns the ends of sequences that are
        too long for the new worker, and of a request found to crash workers.
        """
        self._set_now(now)
        is_making = self.parts.num_in_making > self.trials.num_untold or self.trials.is_unsure
        endings: list[Ending] = []
        if has_died and (culprit := self.suspects.blame(self.in_flight, is_making=is_making)) is not None:
            endings.append(Ending(culprit, ENDS_WORKERS, "ends_workers"))
            self.step_size.restore()
        self.queue_bound.requeued(len(self.running))
        for seq in list(self.running):
            self.accounts.leave(seq, self.kv.now, -1)
            self.running.leave(seq)
            self._put_back(seq)
        self.waiting.release_all()  # what parts await will not come
        now = self.kv.now
        self.accounts.forget_in_flight(now)
        self._set_limits(self.limits if hello is None else WorkerLimits.of(self.step_size.options, hello))
        self.kv.now = now
        for reset in self.parts.reset:
            endings += reset(self.limits, has_died=has_died)
        self.trials.forget_worker()
        deltas: Deltas = {}
        for ending in endings:
            self._end(*ending, deltas)
        max_len = self.limits.max_sequence_len
        for request in list(self.waiting.requests()):
            if refusal := self.parts.refusal(request):
                self._end(request, refusal.reason, refusal.code, deltas)
                continue
            for seq in request.shorten(max_len):
                error = f"the sequence has {seq.num_tokens} tokens; the current worker's limit is {max_len}"
                self._end_sequence(seq, error, "internal", deltas)
        return deltas

    def answered(self, message: Message) -> Deltas:
        """The workers have sent something that is a part's; return the ends of sequences that cannot go on."""
        deltas: Deltas = {}
        for ending in self.parts.answered[type(message)](message):
            self._end(*ending, deltas)
        return deltas

    def take_messages(self, *, before_plan: bool) -> list[Message]:
        """Return the parts' messages for the workers, those that come before a plan or those behind it.

        What is on trial is asked for when the workers do nothing else.
        """
        messages = self.parts.take_messages(before_plan=before_plan)
        is_due = before_plan and self.is_on_trial and not self.in_flight and self.parts.num_in_making == 1
        if is_due and (order := self.trials.take_order()) is not None:
            messages.append(order)
        return messages

    def room_for(self, seq: Sequence, start: Start) -> tuple[int, int]:
        """Return how many pages a sequence that begins there needs, and how many it could have now."""
        return self._admissions.room_for(seq, start)

    @property
    def is_on_trial(self) -> bool:
        """Whether no step may be planned: the worker makes, or is to make, what may have killed one."""
        return self.trials.current is not None

    def bound_queue(self, now: float) -> None:
        """Set the queue's limit. Call it several times a second while requests come and go."""
        totals = self.totals
        self.queue_bound.note(now, totals.num_completed, totals.num_prompt_tokens, self.limits.max_num_seqs)

    def reset_prefix_cache(self) -> int:
        """Drop all cached pages that no sequence uses; return how many."""
        for drop_cached in self.parts.drop_cached:
            drop_cached()
        return self.kv.drop_cached()

    # --- a step -----------------------------------------------------------------------------

    @property
    def can_schedule(self) -> bool:
        """Whether the pipeline has room for another step. (There may still be nothing to compute.)"""
        return len(self.in_flight) < self.max_in_flight

    @property
    def has_work(self) -> bool:
        """Whether some request is not finished."""
        return bool(self.requests)

    @property
    def wakes_at(self) -> float:
        """When `schedule` may have something to compute even if nothing else happens, by its clock; or inf."""
        if self.is_on_trial:
            return inf  # the trial's end comes first
        return self.parts.wakes_at

    def schedule(self, now: float = 0.0, *, with_record: bool = False) -> ScheduledStep | None:
        """Plan the next step: running decodes, then chunks of running prefills, then admissions.

        `now`: seconds, by the same clock as in `add_request`: for accounts and parts.
        Returns None if the pipeline is full or there is nothing to compute before a result comes.
        """
        if not self.can_schedule or self.is_on_trial:
            return None
        self.kv.now = now
        if self.parts.advance or self.suspects.groups:
            self._advance()
        running, launches, builder = self.running, self._launches, PlanBuilder()
        if self.waiting.num_seqs and (self.policy.preempts or running.giving_way or not running.num_free_rows):
            self._yielding.make_way()
        for planning in self.parts.planning:
            planning()
        admitted: list[Admission] = []
        decodes, starts = launches.decodes(builder)
        num_decodes = len(running.decodes)
        has_drafts = self.parts.has_drafts
        num_drafts = self._add_drafts(builder, decodes) if has_drafts else []
        if running.prefills or self.waiting.num_seqs:
            room = self._room_for_prompts(starts, num_drafts)
            if running.prefills:
                launches.prefills(builder, room, is_alone=not starts and not self.in_flight)
            if self.waiting.num_seqs:
                self._admit(builder, room, admitted)
        chunks = builder.chunks
        if not starts and not chunks and not self.parts.awaits_plan:
            return None
        step_id = self.totals.num_steps
        self.totals.num_steps = step_id + 1
        plan = builder.build(step_id, decodes, starts, running.freed_rows, self.kv)
        running.freed_rows.clear()
        if chunks:
            for planned in self.parts.planned:
                planned(chunks, step_id)
        num_samples = len(starts)
        for chunk in chunks:
            if chunk.samples:
                num_samples += 1
                running.to_decode(chunk.seq)
        predicted = self.pace.predicted(starts, chunks) if chunks else None
        is_whole = launches.takes_all and len(starts) == num_decodes
        if has_drafts:  # draining sequences may decode again
            is_whole &= builder.drafts is None and not running.draining
        self.in_flight.append(
            InFlightStep(
                step_id=step_id,
                decodes=decodes,
                chunks=chunks,
                num_samples=num_samples,
                num_left=running.num_left,
                has_logprobs=decodes.has_logprobs or builder.has_logprobs,
                num_drafts=num_drafts,
                predicted=predicted,
                starts=plan.start,
                num_context=launches.num_context,
                is_whole=is_whole,
                num_pooled=builder.num_pooled,
            )
        )
        preempted = self._yielding.preempted
        if preempted or with_record:  # the step, or its record, keeps the list
            self._yielding.preempted = []
        record = None
        if with_record:
            record = self._record(plan, builder, decodes, admitted, preempted, predicted[1] if predicted else 0)
        return ScheduledStep(plan, record, admitted, preempted)

    def _advance(self) -> None:
        """Bring up to date what time, or messages since the last step, have changed."""
        if self.suspects.groups:
            self.suspects.advance()
        is_idle = not len(self.running) and not self.waiting.num_seqs
        for advance in self.parts.advance:
            for ending in advance(is_idle=is_idle):
                self._end(*ending, self.ended)

    def _add_drafts(self, builder: PlanBuilder, decodes: DecodeBatch) -> list[int]:
        """Let decodes compute further positions; prompts keep nearly all their room."""
        running, most = self.running, self.limits.max_num_batched_tokens
        has_prompts = bool(running.prefills or (self.waiting.num_seqs and running.num_free_rows))
        is_awaited = any(step.num_drafts for step in self.in_flight)
        room = DraftRoom.of_step(most, len(running), self._launches.num_context, has_prompts, is_awaited)
        most_of_each = self.parts.drafting.num_drafts(decodes.seqs, room)
        return builder.add_drafts(most_of_each, decodes, self.kv, is_awaited=is_awaited)

    def _room_for_prompts(self, starts: list[int], num_drafts: ListOf[int]) -> Room:
        """The room that the decodes at these positions, with so many drafts each, leave for prompts."""
        running, num_stages = self.running, self.limits.num_stages
        # All decodes may be in one step again, and so may draining sequences if drafts assumed right are rejected.
        num_rows = len(running.decodes) + (len(running.draining) if self.parts.has_drafts else 0)
        most = self.limits.max_num_batched_tokens - max(num_rows, len(starts) + sum(num_drafts))
        if num_stages > 1:
            num_pending = self.waiting.num_tokens + running.num_pending  # if no waiting prefix is cached
            most = min(most, chunk_for_stages(num_pending, num_stages))
        drafts_us = self.parts.drafting.drafts_us(num_drafts) if num_drafts else 0.0
        room = self.pace.room(most, starts, self.parts.longest_step_us, drafts_us)
        for divide in self.parts.divide:
            divide(room)
        return room

    def _admit(self, builder: PlanBuilder, room: Room, admitted: list[Admission]) -> None:
        """Let waiting sequences enter rows, and note why the next one does not."""
        if self.running.num_free_rows:
            for check_head in self.parts.check_head:
                check_head()
        admit, is_stalled = self._admissions.admit, self._launches.is_stalled
        self._blocked_by = admit(builder, room, admitted, is_stalled=is_stalled)
        if self._blocked_by == Blocked.NO_PAGES and self._parts_make_way():
            self._blocked_by = admit(builder, room, admitted, is_stalled=is_stalled)

    def _parts_make_way(self) -> bool:
        """Whether a part that held pages lets the head of the queue have some."""
        is_idle = not len(self.running)
        return any(make_way(is_idle=is_idle) for make_way in self.parts.make_way)

    def _record(
        self, plan: StepPlan, builder: PlanBuilder, decodes: DecodeBatch, admitted: list[Admission],
        preempted: list[Preemption], predicted_us: int,
    ) -> StepRecord:  # fmt: skip
        why = [(seq.request_id, seq.sequence_idx, why) for seq, why in self.reasons().waiting(MAX_WAITING_SHOWN)]
        counts = waiting_reasons(self.waiting, self._blocked_by)
        why_drafts = self.parts.drafting.why_drafts
        return make_record(decodes, builder, admitted, preempted, self.kv, why, counts, predicted_us, plan, why_drafts)

    def _vacate(self, seq: Sequence, at_end: bool) -> None:
        self._leave_row(seq)
        self._put_back(seq, at_end=at_end)

    def _leave_row(self, seq: Sequence) -> None:
        self.accounts.leave(seq, self.kv.now, self.in_flight[-1].step_id if self.in_flight else -1)
        are_kept = [keeps_pages(seq) for keeps_pages in self.parts.keeps_pages]
        if not any(are_kept):
            self.kv.release(seq)
        self.running.leave(seq)

    def _put_back(self, seq: Sequence, *, at_end: bool = False) -> None:
        self.waiting.put_back(seq, at_end=at_end)
        for waits in self.parts.waits:
            waits(seq.request)

    # --- results ----------------------------------------------------------------------------

    def process(self, result: StepResult, now: float | None = None) -> dict[Owner, TokenBatch]:
        """Apply the result of the oldest step in flight; return what to tell each owner. `now`: as in `abort`.

        Raises:
            UnexpectedResultError: it is not the result of that step; nothing was changed.
        """
        tokens, counts = checked_tokens(self.in_flight, result, self.limits.vocab_size)
        step = self.in_flight.popleft()
        self._set_now(now)
        self.outcome = outcome = draft_outcome(step, result, counts) if step.num_drafts else None
        for stepped in self.parts.stepped:
            stepped(step, result, outcome)
        if step.decodes.seqs or step.chunks:  # otherwise it only copied pages
            drafts_us = self.parts.drafting.drafts_us(outcome.num_guessed) if outcome else 0.0
            self.pace.note(step, result, drafts_us)
            self.accounts.settle(step, result.num_forward_us, self.pace.step_time.rates, self.kv.now, outcome)
        if result.num_copied_pages:
            for copied in self.parts.copied:
                copied(result)
        told = self.settling.apply(step, result, tokens, counts)
        for applied in self.parts.applied:
            applied(step, result)
        return told

    def _remove(self, seq: Sequence) -> None:
        """A sequence ends, for any reason: free its row and pages, and remove it from its request."""
        request = seq.request
        if seq.row >= 0:
            if request.sampling.pooling is None:  # otherwise there is nothing to learn about lengths
                for finished in self.parts.finished:
                    finished(request, seq.num_outputs)
            self._leave_row(seq)
            self._admissions.sequence_left()
        else:
            if self.kv.tiers is not None:
                self.kv.tiers.forget(seq)
            self.waiting.remove(seq)
        if not request.is_live:
            del self.requests[request.request_id]
            self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """A request has ended or is paused: it waits for nothing."""
        for leave in self.parts.leave:
            leave(request)

    def take_ended(self) -> Deltas:
        """Return the ends of requests that had to end while they waited, since the last call."""
        ended, self.ended = self.ended, {}
        return ended

    def _end(self, request: Request, error: str, code: ErrorCode, deltas: Deltas) -> None:
        """End all sequences of a waiting request with an error."""
        for seq in list(request.waiting):
            self._end_sequence(seq, error, code, deltas)

    def _end_sequence(self, seq: Sequence, error: str, code: ErrorCode, deltas: Deltas) -> None:
        self._remove(seq)
        bill = self.accounts.bill(seq, self.kv.now)
        deltas.setdefault(seq.owner, []).append(seq.error_delta(error, code, bill))

    def _set_now(self, now: float | None) -> None:
        if now is not None:
            self.kv.now = now

    # --- figures ----------------------------------------------------------------------------

    def reasons(self) -> Reasons:
        """Return a snapshot of why requests wait now."""
        return Reasons(self, self._admissions, self.pace, self._blocked_by)

    def stats(self, *, is_ready: bool = True) -> EngineStats:
        """Return the counters as they are sent to the frontends."""
        what = self.limits, self.waiting, list(self.running), self.kv, self.totals, self._blocked_by
        return engine_stats(*what, self.parts, max_turns=self.queue_bound.turns_allowed(), is_ready=is_ready)
