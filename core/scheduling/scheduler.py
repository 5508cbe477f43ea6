"""The scheduler: decides what each step computes, and what its results mean. Pure: no IO, no clock, no tensor.

    add_request / abort ──▶ waiting ──schedule()──▶ running ──process()──▶ finished
                               ▲                       │
                               └────── preempted ◀─────┘

One rule: each step computes the next chunk of what is known (or will be when the steps in flight
return) but not computed yet. Up to `pipeline_depth` steps are planned ahead of the results.
"""

from collections import deque

from msgspec.structs import replace

from penstock.core.config.options import SchedulerOptions
from penstock.core.kv.page_groups import make_pages
from penstock.core.scheduling.grammar_gate import GrammarGate
from penstock.core.scheduling.results import Deltas, Settling, UnexpectedResultError, checked_tokens
from penstock.core.scheduling.running import Admissions, RunningSet
from penstock.core.scheduling.stats import Totals, engine_stats
from penstock.core.scheduling.step_record import Admission, Preemption, ScheduledStep, make_record
from penstock.core.scheduling.suspects import ENDS_WORKERS, Suspects
from penstock.core.scheduling.yielding import by_level, by_share
from penstock.core.sequences.intake import Refusal, WorkerLimits, check_request
from penstock.core.sequences.policy import Policy, make_policy
from penstock.core.sequences.sequence import Owner, Request, Sequence
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.core.steps.drafts import Drafter
from penstock.core.steps.plan_builder import DecodeBatch, InFlightStep, PlanBuilder
from penstock.core.steps.prefill_pace import MIN_TOKENS, PrefillPace, Room
from penstock.core.steps.step_size import StepSize
from penstock.ipc.messages import (
    AddRequest,
    EngineStats,
    ErrorCode,
    GrammarPrepared,
    StepResult,
    TokenBatch,
    WorkerHello,
)

__all__ = ["Deltas", "Refusal", "ScheduledStep", "Scheduler", "UnexpectedResultError"]


class Scheduler:
    """Admission, batching, pages, prefix reuse and preemption for one worker group."""

    def __init__(
        self, options: SchedulerOptions, limits: WorkerLimits, *, drafter: Drafter | None = None, num_parts: int = 1
    ) -> None:
        """`drafter` guesses tokens for decodes. The decodes are in `num_parts` parts; each plan takes one part."""
        self._options = options
        self.pipeline_depth = options.pipeline_depth
        self.drafter = drafter
        self._num_parts = num_parts
        self.policy = make_policy(options.scheduling_policy)
        self._has_keys = type(self.policy).key is not Policy.key  # otherwise all requests are on one level
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.totals = Totals()
        self.suspects = Suspects()
        self.step_size = StepSize(options)
        self.max_turns = 0  # turns that may come before a new request's own; 0: unlimited
        self._num_requeued = 0  # sequences put back into the queue by a worker's death, and possibly still there
        self._pace = PrefillPace(options.max_prefill_ms)
        self.grammars = GrammarGate(self.waiting, limits.max_num_seqs)
        self._set_limits(limits)

    @classmethod
    def for_worker(cls, options: SchedulerOptions, hello: WorkerHello) -> "Scheduler":
        """Return a scheduler for the first worker that said hello."""
        return cls(options, WorkerLimits.of(options, hello))

    def _set_limits(self, limits: WorkerLimits) -> None:
        self.limits = limits
        self.kv = make_pages(
            limits.num_pages,
            limits.page_size,
            limits.window_groups,
            enable_prefix_caching=self._options.enable_prefix_caching,
        )
        self.running = RunningSet(limits.max_num_seqs, self._num_parts)
        self.in_flight: deque[InFlightStep] = deque()
        self._admissions = Admissions(self.waiting, self.running, self.kv, self.totals, self.suspects, self.grammars)
        self._nobody_yields_to: tuple[Sequence | None, int, int, int] = (None, 0, 0, 0)  # until sequences come or go
        self._blocked_by = ""  # why the head of the queue waits, as of the last step
        self._is_stalled = False  # in this step, a decode waits for pages of sequences that are about to end
        self._preempted: list[Preemption] = []  # since the last record
        self.settling = Settling(self.kv, self.running, self.totals, self._remove)

    # --- requests ---------------------------------------------------------------------------

    def add_request(self, message: AddRequest, owner: Owner, now: float = 0.0) -> Refusal | None:
        """Accept a request: all its sequences wait. A refusal leaves everything unchanged."""
        if message.request_id in self.requests:
            return Refusal("internal", f"request id {message.request_id!r} is in use by a live request")
        refusal = check_request(message, self.limits, self.waiting, self._options, self._turns_allowed())
        if refusal is not None:
            return refusal
        self._num_requeued += len(message.progress)
        request = Request(message, owner, self.limits.max_sequence_len, now)
        request.namespace = self.limits.namespace(message.cache_salt, request.num_prompt_tokens)
        if self._has_keys:
            request.level = self.policy.key(request, now)
        self.requests[message.request_id] = request
        self.waiting.add_request(request)
        return None

    def abort(self, request_id: str, sequence_idx: int = -1) -> None:
        """Drop a request, or one sequence of it, without a delta. Unknown ids are fine."""
        request = self.requests.get(request_id)
        for seq in [] if request is None else [*request.running, *request.waiting]:
            if sequence_idx in (-1, seq.sequence_idx):
                self.totals.num_completed += sequence_idx >= 0 and seq.row >= 0  # the frontend found a stop string
                self._remove(seq)

    def pause(self, request_id: str) -> None:
        """Take a request out of the batch until `resume`: only its tokens are kept. Unknown ids are fine."""
        request = self.requests.get(request_id)
        if request is not None and not request.is_paused:
            for seq in list(request.running):
                self._vacate(seq)
                self._admissions.sequence_left()
            self.waiting.pause(request)
            if request.sampling.grammar:
                self.grammars.leave(request)

    def resume(self, request_id: str) -> None:
        """Continue a paused request, after those that are waiting already. Unknown ids are fine."""
        request = self.requests.get(request_id)
        if request is not None and request.is_paused:
            self.waiting.resume(request)

    def expire_queued(self, now: float) -> Deltas:
        """End the requests that have waited for their first row for longer than `queue_timeout`; return their deltas.

        Requests that once had a row were admitted and do not expire, nor do requests of an earlier scheduler.
        """
        deltas: Deltas = {}
        seconds = self._options.queue_timeout
        late = [r for r in self.requests.values() if r.arrived and now - r.arrived > seconds] if seconds else []
        for request in late:
            if all(seq.num_cached_tokens < 0 for seq in (*request.running, *request.waiting)):
                self._end(
                    request, f"the request waited in the queue for more than {seconds:g} s", "queue_timeout", deltas
                )
        return deltas

    def abort_owner(self, owner: Owner) -> int:
        """Drop all requests of an owner that is gone; return how many it had."""
        request_ids = [request.request_id for request in self.requests.values() if request.owner == owner]
        for request_id in request_ids:
            self.abort(request_id)
        return len(request_ids)

    def reset_worker(self, hello: WorkerHello | None = None, *, has_died: bool = True) -> Deltas:
        """The worker is gone, or another one is there: everything that it held is lost.

        Running sequences wait again at their places in the order and will be recomputed from their
        tokens; steps in flight are forgotten, and the prefix cache is empty. With a hello, the new worker's
        sizes apply. Returns the ends of sequences that are too long for it, and of a request found to crash workers:
        if the worker `has_died`, what it had in flight is suspected.
        """
        culprit = self.suspects.blame(self.in_flight) if has_died else None
        if culprit is not None:
            self.step_size.restore()
        was_idle = not self.in_flight
        self._num_requeued += len(self.running)
        for seq in list(self.running):
            self.running.leave(seq)
            self.waiting.put_back(seq)
        self._set_limits(self.limits if hello is None else WorkerLimits.of(self.step_size.options, hello))
        culprits = self.grammars.reset(self.limits.max_num_seqs, has_died=has_died, was_idle=was_idle)
        deltas: Deltas = {}
        for request in culprits if culprit is None else [culprit, *culprits]:
            self._end(request, ENDS_WORKERS, "ends_workers", deltas)
        max_len = self.limits.max_sequence_len
        for request in list(self.waiting.requests()):
            request.limit_length(max_len)
            for seq in list(request.waiting):
                seq.limit_length(request.max_len)
                if seq.num_tokens >= seq.max_len:
                    self._remove(seq)
                    error = f"the sequence has {seq.num_tokens} tokens; the current worker's limit is {max_len}"
                    deltas.setdefault(request.owner, []).append(seq.error_delta(error))
        return deltas

    def grammar_prepared(self, message: GrammarPrepared) -> Deltas:
        """A grammar is ready, or cannot be used; in that case return the ends of the sequences that need it."""
        deltas: Deltas = {}
        for request in self.grammars.prepared(message):
            self._end(request, message.error, "grammar", deltas)
        return deltas

    def reset_prefix_cache(self) -> int:
        """Drop all cached pages that no sequence uses; return how many."""
        return self.kv.drop_cached()

    # --- a step -----------------------------------------------------------------------------

    @property
    def can_schedule(self) -> bool:
        """Whether the pipeline has room for another step. (There may still be nothing to compute.)"""
        return len(self.in_flight) <= self.pipeline_depth

    @property
    def has_work(self) -> bool:
        """Whether some request is not finished."""
        return bool(self.requests)

    def schedule(self, now: float = 0.0, *, with_record: bool = False) -> ScheduledStep | None:
        """Plan the next step: running decodes, then chunks of running prefills, then admissions.

        `now` is for policies whose keys change: seconds, by the same clock as in `add_request`.
        Returns None if the pipeline is full or there is nothing to compute before a result comes.
        """
        if not self.can_schedule or self.grammars.trial is not None:
            return None
        if self.suspects.groups:
            self.suspects.advance()
        if self.policy.changes:
            self._renew_keys(now)
        if self.waiting.num_seqs:
            self._make_way()
        running, builder = self.running, PlanBuilder()
        admitted: list[Admission] = []
        self._is_stalled = False
        decodes, starts = self._place_decodes(builder)
        if not starts and self._num_parts > 1:  # if one part has nothing to compute, another one may
            decodes, starts = self._place_another_part(builder)
        num_drafts: list[int] = []
        if self.drafter is not None:
            room = self.limits.max_num_batched_tokens - len(running)  # a step keeps a token for each running row
            num_drafts = builder.add_drafts(self.drafter, decodes, self.kv, room)
        blocked_by = ""
        newcomers: list[Sequence] = []
        if running.prefills or self.waiting.num_seqs:
            # All decodes may come together again, with those whose last token is launched only if its drafts are right.
            num_rows = len(running.decodes) + (len(running.draining) if self.drafter is not None else 0)
            num_tokens = max(num_rows, len(starts) + sum(num_drafts))
            for_prompts = self._pace.room(self.limits.max_num_batched_tokens - num_tokens, starts)
            if running.prefills:
                self._place_prefills(builder, for_prompts, is_first=not starts)
            if self.waiting.num_seqs:
                blocked_by = self._admissions.admit(builder, for_prompts, admitted, is_stalled=self._is_stalled)
                newcomers = self._admissions.take_newcomers()
                self._blocked_by = blocked_by
        chunks = builder.chunks
        if not starts and not chunks:
            return None
        step_id = self.totals.num_steps
        self.totals.num_steps = step_id + 1
        plan = builder.build(step_id, decodes, starts, running.freed_rows)
        running.freed_rows.clear()
        num_samples = len(starts)
        for chunk in chunks:
            if chunk.samples:
                num_samples += 1
                running.to_decode(chunk.seq)
        has_logprobs = decodes.has_logprobs or builder.has_logprobs
        predicted = self._pace.predicted(starts, chunks) if chunks else None
        self.in_flight.append(
            InFlightStep(step_id, decodes, chunks, num_samples, running.num_left, has_logprobs, num_drafts, predicted)
        )
        preempted, self._preempted = self._preempted, []
        record = None
        if with_record:
            predicted_us = predicted[1] if predicted is not None else 0
            record = make_record(decodes, builder, admitted, preempted, self.kv, self.waiting, blocked_by, predicted_us)
        return ScheduledStep(plan, record, newcomers)

    def _place_another_part(self, builder: PlanBuilder) -> tuple[DecodeBatch, list[int]]:
        parts = (self._place_decodes(builder) for _ in range(1, self._num_parts))
        return next((each for each in parts if each[1]), (DecodeBatch([]), []))

    def _place_decodes(self, builder: PlanBuilder) -> tuple[DecodeBatch, list[int]]:
        """Launch one token of each decode; return those decodes, and each one's position."""
        batch = self.running.decode_batch()
        seqs = batch.seqs
        # No budget check is needed here: admissions only use what all running rows leave over, so there
        # are never more running rows than tokens in a step.
        num_preemptions = self.totals.num_preemptions
        starts: list[int] = []
        append_start = starts.append
        unplaced: list[Sequence] = []
        for seq in seqs:
            start = seq.num_computed_tokens
            if start >= seq.launch_limit and not self._extend(seq, builder):
                unplaced.append(seq)
                continue
            seq.num_computed_tokens = start + 1
            append_start(start)
        if unplaced or num_preemptions != self.totals.num_preemptions:
            not_placed = dict.fromkeys(unplaced)
            placed = [seq for seq in seqs if seq.row >= 0 and seq not in not_placed]
            return DecodeBatch(placed), [seq.num_computed_tokens - 1 for seq in placed]
        return batch, starts

    def _extend(self, seq: Sequence, builder: PlanBuilder) -> bool:
        """Give a decode the pages for its next position; False if it computes nothing in this step."""
        running, kv = self.running, self.kv
        if seq.row < 0:
            return False  # preempted a moment ago
        if seq.num_computed_tokens >= seq.max_computed_tokens:
            running.to_draining(seq)
            return False
        while not kv.reserve_next(seq):
            if running.draining or (kv.windows and seq.num_inflight_tokens):
                # Their pages, or its own behind a window, come back with results in flight: cheaper than preempting.
                self._is_stalled = True
                return False
            victim = self.policy.victim(running)
            if victim.num_computed_tokens >= victim.max_computed_tokens:
                self._is_stalled = True  # the victim is about to end
                return False
            self._preempt(victim, f"{seq.request_id}/{seq.sequence_idx} needed a page")
            if victim is seq:
                return False
        if kv.windows:
            builder.add_pages(seq, *kv.grow(seq, seq.launch_limit + 1))
        else:
            builder.append_page(seq, kv.append_page(seq))
        return True

    def _place_prefills(self, builder: PlanBuilder, room: Room, *, is_first: bool) -> None:
        """Launch the next chunks of prefills; `is_first`: nothing else is in this step."""
        for seq in list(self.running.prefills):
            if seq.row < 0:
                continue
            start = seq.num_computed_tokens
            num_tokens = room.tokens_from(start)
            if num_tokens <= 0:
                if builder.chunks or room.num_tokens <= 0:
                    break
                num_tokens = min(MIN_TOKENS, room.num_tokens)  # expensive far into a prompt, but it must go on
            end = min(start + num_tokens, seq.num_tokens)
            if end > seq.launch_limit:  # only for groups with a window: they get pages chunk by chunk
                num_tokens = min(end, self._grow(seq, end, builder, is_first)) - start
                if seq.row < 0:
                    continue
                if num_tokens <= 0:
                    self._is_stalled = True
                    break
            room.use(start, builder.add_next_chunk(seq, num_tokens))

    def _grow(self, seq: Sequence, end: int, builder: PlanBuilder, is_first: bool) -> int:
        """Give a prefill pages for positions before `end`, or as many as there are; return how many positions.

        Nothing in this step or in flight is preempted for them: its pages come back anyway, or it continues.
        """
        pages = self.kv.grow(seq, end)
        is_first = is_first and not builder.chunks and not self.in_flight
        while is_first and seq.launch_limit <= seq.num_computed_tokens:
            victim = self.policy.victim(self.running)
            self._preempt(victim, f"{seq.request_id}/{seq.sequence_idx} needed a page")
            if victim is seq:
                return 0
            pages = self.kv.grow(seq, end)
        builder.add_pages(seq, *pages)
        return seq.launch_limit

    def _renew_keys(self, now: float) -> None:
        key = self.policy.key
        keys = {request: key(request, now) for request in self.requests.values()}
        if any(request.level != level for request, level in keys.items()):
            self.waiting.change_levels(keys)
            self._nobody_yields_to = (None, 0, 0, 0)

    def _make_way(self) -> None:
        """Take rows, and pages, from sequences that yield to the head of the queue (`yielding.py`)."""
        running, head = self.running, self.waiting.head()
        state = (head, running.num_entered, running.num_left, self.waiting.num_line_ups)
        if head is None or state == self._nobody_yields_to or running.draining:
            return  # a draining sequence leaves its row in a moment
        if self.policy.preempts:
            while (victim := by_level(head, running, self.policy)) is not None and self._admissions.lacks_room(head):
                if head.request.sampling.grammar and not self.grammars.admits(head.request):
                    return  # its grammar is not ready: it is held until its turn comes again
                self._preempt(victim, f"{head.request_id}/{head.sequence_idx} has a higher priority")
                self._admissions.favour(head)
            if victim is not None:
                return
        if not running.num_free_rows and not self._admissions.is_held:
            newcomer = self.waiting.without_row(running.rows_of)
            if newcomer is not None and self._admissions.lacks_room(newcomer):
                victim = by_share(newcomer, running)
                if victim is not None:
                    if newcomer.request.sampling.grammar and not self.grammars.admits(newcomer.request):
                        return
                    self.waiting.bring_forward(newcomer)
                    self._preempt(victim, f"{newcomer.request_id}/{newcomer.sequence_idx} had no row", at_end=True)
                    return
        self._nobody_yields_to = state

    def _preempt(self, seq: Sequence, reason: str, *, at_end: bool = False) -> None:
        """Take back a running sequence's pages. Its settled full pages are in the prefix cache already."""
        self.totals.num_preemptions += 1
        if not at_end:
            self._admissions.hold()
        self._preempted.append(Preemption(seq.request_id, seq.sequence_idx, reason))
        self._vacate(seq, at_end=at_end)

    def _vacate(self, seq: Sequence, *, at_end: bool = False) -> None:
        self.kv.release(seq)
        self.running.leave(seq)
        self.waiting.put_back(seq, at_end=at_end)

    # --- results ----------------------------------------------------------------------------

    def process(self, result: StepResult) -> dict[Owner, TokenBatch]:
        """Apply the result of the oldest step in flight; return what to tell each owner.

        Raises:
            UnexpectedResultError: it is not the result of that step; nothing was changed.
        """
        tokens, counts = checked_tokens(self.in_flight, result, self.limits.vocab_size)
        step = self.in_flight.popleft()
        self._pace.note(step, result)
        if self.policy.changes:
            for seq, num_tokens in zip(step.decodes.seqs, step.decode_sizes, strict=True):
                self.policy.on_tokens(seq.request, num_tokens)
            for chunk in step.chunks:
                self.policy.on_tokens(chunk.seq.request, chunk.num_new)
        return self.settling.apply(step, result, tokens, counts)

    def _remove(self, seq: Sequence) -> None:
        """A sequence ends, for whatever reason: free its row and pages, and remove it from its request."""
        request = seq.request
        if seq.row >= 0:
            self.kv.release(seq)
            self.running.leave(seq)
            self._admissions.sequence_left()
        else:
            self.waiting.remove(seq)
        if not request.is_live:
            del self.requests[request.request_id]
            if request.sampling.grammar:
                self.grammars.leave(request)

    def _end(self, request: Request, error: str, code: ErrorCode, deltas: Deltas) -> None:
        """End all sequences of a waiting request with an error."""
        for seq in list(request.waiting):
            self._remove(seq)
            deltas.setdefault(seq.owner, []).append(seq.error_delta(error, code))

    # --- figures ----------------------------------------------------------------------------

    def stats(self, *, is_ready: bool = True) -> EngineStats:
        """Return the counters as they are sent to the frontends."""
        stats = engine_stats(
            self.limits, self.waiting, list(self.running), self.kv, self.totals, self._blocked_by, is_ready=is_ready
        )
        return replace(stats, waiting_tenants=self.waiting.tenants(), max_turns=self._turns_allowed())

    def _turns_allowed(self) -> int:
        """Sequences that ran when a process died do not mean a long queue: they count on top of the queue's limit."""
        self._num_requeued = min(self._num_requeued, self.waiting.num_seqs)
        return self.max_turns and self.max_turns + self._num_requeued
