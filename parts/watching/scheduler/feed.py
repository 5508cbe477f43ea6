"""The feed of a watched engine: steps and events, sampled and of bounded size.

    planned ──▶ kept, if there is room ──▶ returned ──▶ sent several times a second
    arrived, admitted, preempted, ... ──▶ sent, and kept in `Lives`

A kept step holds the bytes that were sent to the worker, so nothing is computed for it. Events are rare, and noted for
all steps. Steps and events without room are only counted.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from penstock.core.scheduling.scheduler import Scheduler
from penstock.core.scheduling.step_record import ScheduledStep
from penstock.core.sequences.sequence import Owner, Request, Sequence
from penstock.ipc.messages import (
    FROM_HOST,
    TO_HOST,
    AbortRequest,
    AddRequest,
    PauseRequest,
    ResumeRequest,
    SequenceDelta,
    StepPlan,
    StepResult,
    TokenBatch,
)
from penstock.parts.watching.messages import InRow, Picture, SequenceEvent, Waiting, WatchedStep, WatchedSteps
from penstock.parts.watching.scheduler.bucket import Bucket
from penstock.parts.watching.scheduler.lives import Lives

STEPS_PER_SECOND, STEPS_AT_ONCE = 250, 50
STEP_BYTES, EVENT_BYTES, ROW_BYTES = 96 << 10, 64 << 10, 64 << 10
"""Bytes per second for steps, for events, and for running and waiting sequences; bursts may be half of each."""

MAX_WAITING = 64
MAX_BYTES_PER_SECOND = STEP_BYTES + EVENT_BYTES + ROW_BYTES + (8 << 10)
"""Limit for all messages together, as sent; the last part is for each message's overhead."""

_STEP_SIZE, _EVENT_SIZE, _ROW_SIZE = 96, 56, 56
"""Most bytes of one, without buffers and texts."""

_MAX_TEXT = 400


class _Planned(NamedTuple):
    step_id: int
    num_left_out: int
    sent: float
    schedule_us: int
    plan: StepPlan
    num_decodes: int
    is_same: bool
    num_waiting: int
    free_pages: int
    cached_pages: int
    host_pages: tuple[int, int]


class Feed:
    """Collects the messages for the watchers of one engine. Times are seconds of the scheduler's clock."""

    def __init__(self, scheduler: Scheduler | None, now: float) -> None:
        """`scheduler`: None if there is none yet. Its requests are followed from now on."""
        self.lives = Lives()
        self._planned: deque[_Planned] = deque()  # kept steps without a result
        self._last_id = -1  # of the last kept step
        self._rows: bytes | None = None  # of the last kept step
        self._num_decodes = 0
        self._steps: list[WatchedStep] = []
        self._events: list[SequenceEvent] = []
        self._num_steps_left_out = self._num_events_left_out = 0
        self._begun: dict[tuple[str, int], Sequence] = {}  # live sequences that have returned tokens
        self._number = 0
        self._step_count = Bucket(STEPS_PER_SECOND, STEPS_AT_ONCE, now)
        self._step_bytes = Bucket(STEP_BYTES, STEP_BYTES / 2, now)
        self._event_bytes = Bucket(EVENT_BYTES, EVENT_BYTES / 2, now)
        self._row_bytes = Bucket(ROW_BYTES, ROW_BYTES / 2, now)
        for request in [] if scheduler is None else scheduler.requests.values():
            self._begin_known(request, now)

    def _begin_known(self, request: Request, now: float) -> None:
        """Derive the events of a request that arrived before the feed began from its state."""
        num_seqs = 1 + max(seq.sequence_idx for seq in (*request.running, *request.waiting))
        came = request.arrived or now
        what = SequenceEvent(came, "arrived", request.request_id, 0, -1, request.num_prompt_tokens, num_seqs)
        self.lives.begin(what, [seq.sequence_idx for seq in request.waiting], is_watched=False)
        for seq in request.running:
            at, name = came + seq.queued_us / 1e6, (seq.request_id, seq.sequence_idx)
            self.lives.add(SequenceEvent(came, "waited", *name, text=request.waited_for, until=at))
            self.lives.add(_admitted(seq, at))
        live = (*request.running, *request.waiting)
        self._begun.update({(seq.request_id, seq.sequence_idx): seq for seq in live if seq.num_outputs})

    # --- requests -----------------------------------------------------------------------------

    def on_request(self, message: AddRequest, now: float) -> None:
        """A request has arrived. If it was refused, its deltas follow."""
        num_tokens = len(message.prompt_token_ids) // 4
        event = SequenceEvent(now, "arrived", message.request_id, 0, -1, num_tokens, message.n)
        self.lives.begin(event, range(message.n))
        self._tell(event)

    def on_steer(self, order: AbortRequest | PauseRequest | ResumeRequest, request: Request, now: float) -> None:
        """A live request is about to be steered by its frontend."""
        live = (*request.running, *request.waiting)
        for seq in live:
            match order:
                case AbortRequest():
                    if order.sequence_idx in (-1, seq.sequence_idx):
                        self._finished(seq, "abort", now)
                case PauseRequest():
                    self._note(SequenceEvent(now, "paused", seq.request_id, seq.sequence_idx, tokens=seq.num_outputs))
                case ResumeRequest():
                    self._note(SequenceEvent(now, "resumed", seq.request_id, seq.sequence_idx))
        if isinstance(order, AbortRequest) and all(order.sequence_idx in (-1, seq.sequence_idx) for seq in live):
            self.lives.end(order.request_id)

    def on_owner_gone(self, owner: Owner, scheduler: Scheduler, now: float) -> None:
        """All requests of an owner are about to be aborted."""
        for request in scheduler.requests.values():
            if request.owner == owner:
                self.on_steer(AbortRequest(request.request_id), request, now)

    def on_deltas(self, deltas: Iterable[SequenceDelta], scheduler: Scheduler | None, now: float) -> None:
        """Deltas are sent to a frontend, beside columns of tokens; first and last tokens of sequences are deltas."""
        for delta in deltas:
            name = (delta.request_id, delta.sequence_idx)
            request = None if scheduler is None else scheduler.requests.get(delta.request_id)
            if delta.token_ids and name not in self._begun:
                live = () if request is None else (*request.running, *request.waiting)
                if (seq := next((seq for seq in live if seq.sequence_idx == name[1]), None)) is not None:
                    self._begun[name] = seq
                self._note(SequenceEvent(now, "first token", *name, tokens=len(delta.token_ids)))
            if delta.finish_reason is None or delta.finish_reason == "abort":  # the abort was noted when it was ordered
                continue
            seq = self._begun.pop(name, None)
            num_tokens = len(delta.token_ids) if seq is None else seq.num_outputs
            text = delta.finish_reason if not delta.error else f"error: {delta.error_code}: {delta.error}"
            self._note(SequenceEvent(now, "finished", *name, tokens=num_tokens, text=text[:_MAX_TEXT]))
            if request is None:
                self.lives.end(delta.request_id)

    def _finished(self, seq: Sequence, why: str, now: float) -> None:
        self._begun.pop((seq.request_id, seq.sequence_idx), None)
        what = SequenceEvent(now, "finished", seq.request_id, seq.sequence_idx, seq.row, seq.num_outputs, text=why)
        self._note(what)

    # --- steps --------------------------------------------------------------------------------

    def planned(self, step: ScheduledStep, scheduler: Scheduler, started: float, sent: float) -> None:
        """A step was planned, beginning at `started`, and is sent at `sent`."""
        plan, in_flight = step.plan, scheduler.in_flight[-1]
        for gone in step.preempted:
            text = f"swapped: {gone.reason}" if gone.is_swapped else gone.reason
            seqs = scheduler.requests[gone.request_id].waiting if gone.request_id in scheduler.requests else ()
            tokens = next((seq.num_outputs for seq in seqs if seq.sequence_idx == gone.sequence_idx), 0)
            name = (gone.request_id, gone.sequence_idx)
            self._note(SequenceEvent(started, "preempted", *name, tokens=tokens, text=text[:_MAX_TEXT]))
        for entry in step.admitted:
            text = "fork" if entry.is_fork else "swapped in" if entry.num_host_pages else ""
            counts = entry.num_tokens, entry.num_reused_tokens
            name = (entry.request_id, entry.sequence_idx)
            self._note(SequenceEvent(started, "admitted", *name, entry.row, *counts, text=text))
        for chunk in in_flight.chunks:
            seq = chunk.seq
            what = (seq.request_id, seq.sequence_idx, seq.row, chunk.num_new, chunk.start)
            self.lives.add(SequenceEvent(started, "chunk", *what))
        num_decodes, num_chunks = len(in_flight.decodes.seqs), len(in_flight.chunks)
        is_same = plan.rows == self._rows and num_decodes == self._num_decodes
        size = (
            _STEP_SIZE
            + 4 * num_chunks
            + (0 if is_same else len(plan.rows))
            + (8 * num_decodes if plan.num_drafts else 0)
        )
        if not (self._step_count.has_room(1, sent) and self._step_bytes.has_room(size, sent)):
            self._num_steps_left_out += 1
            return
        self._step_count.use(1)
        self._step_bytes.use(size)
        host = None if scheduler.kv.tiers is None else scheduler.kv.tiers.host
        self._planned.append(
            _Planned(
                plan.step_id,
                plan.step_id - self._last_id - 1 if self._last_id >= 0 else 0,
                sent,
                int((sent - started) * 1e6),
                plan,
                num_decodes,
                is_same,
                scheduler.waiting.num_seqs,
                scheduler.kv.pool.num_free,
                scheduler.kv.pool.num_cached,
                (0, 0) if host is None else (host.num_free, host.num_cached),
            )
        )
        self._last_id, self._rows, self._num_decodes = plan.step_id, plan.rows, num_decodes

    def returned(self, result: StepResult, told: Iterable[TokenBatch], scheduler: Scheduler, received: float) -> None:
        """A step's result was applied, and these batches were sent to the frontends."""
        for batch in told:
            if batch.deltas:
                self.on_deltas(batch.deltas, scheduler, received)
        if not self._planned or self._planned[0].step_id != result.step_id:
            return  # the step was not kept
        kept = self._planned.popleft()
        plan, end = kept.plan, 4 * kept.num_decodes
        self._steps.append(
            WatchedStep(
                kept.step_id,
                kept.num_left_out,
                kept.sent,
                received,
                kept.schedule_us,
                result.num_forward_us,
                result.num_idle_us,
                kept.num_decodes,
                b"" if kept.is_same else plan.rows,
                kept.is_same,
                plan.num_new[end:],
                result.num_tokens[:end],
                result.num_drafted[:end],
                kept.num_waiting,
                kept.free_pages,
                kept.cached_pages,
                kept.host_pages,
                plan.copy_tiers.count(TO_HOST),
                plan.copy_tiers.count(FROM_HOST),
            )
        )

    def forget_planned(self, now: float) -> None:
        """The worker is gone: the results of its steps will not come, and all running sequences wait again."""
        self._planned.clear()
        self._rows = None
        self._tell(SequenceEvent(now, "worker lost", ""))

    # --- messages -----------------------------------------------------------------------------

    def take(self, scheduler: Scheduler | None, now: float, unix_time: float, *, is_whole: bool) -> WatchedSteps:
        """Return everything noted since the last call; with `is_whole` also the whole current state."""
        waiting: tuple[Waiting, ...] = ()
        picture, reasons, totals = None, dict[str, int](), dict[str, int]()
        if scheduler is not None:
            if scheduler.waiting.num_seqs:
                shown = self.look(scheduler, now)
                waiting = tuple(each for each in shown if self._has_row_room(each.request_id, each.reason, now))
                reasons = scheduler.reasons().counts()
            totals = _totals(scheduler)
            if is_whole:
                picture = self._picture(scheduler, now)
                self._rows = None  # a new watcher knows no earlier step
        steps, self._steps = self._steps, []
        events, self._events = self._events, []
        num_steps, self._num_steps_left_out = self._num_steps_left_out, 0
        num_events, self._num_events_left_out = self._num_events_left_out, 0
        self._number += 1
        return WatchedSteps(
            self._number, now, unix_time, tuple(steps), num_steps, tuple(events), num_events,
            waiting, 0 if scheduler is None else scheduler.waiting.num_seqs, reasons, totals, picture,
        )  # fmt: skip

    def look(self, scheduler: Scheduler, now: float) -> list[Waiting]:
        """Return the first waiting sequences with their current reasons."""
        shown = [_waiting(seq, why) for seq, why in scheduler.reasons().waiting(MAX_WAITING)]
        for event in self.lives.looked(shown, now):
            self._tell(event)
        return shown

    def _picture(self, scheduler: Scheduler, now: float) -> Picture:
        limits, running = scheduler.limits, list(scheduler.running)
        rows = tuple(_in_row(seq) for seq in running if self._has_row_room(seq.request_id, "", now))
        num_places = scheduler.parts.tier().get("places", 0)
        sizes = limits.max_num_seqs, limits.num_pages, limits.page_size, limits.num_host_pages, num_places
        return Picture(*sizes, rows, len(running))

    def _has_row_room(self, request_id: str, reason: str, now: float) -> bool:
        return self._row_bytes.take(_ROW_SIZE + len(request_id) + len(reason), now)

    def _note(self, event: SequenceEvent) -> None:
        waited = self.lives.add(event)
        if waited is not None:
            self._tell(waited)
        self._tell(event)

    def _tell(self, event: SequenceEvent) -> None:
        if self._event_bytes.take(_EVENT_SIZE + len(event.request_id) + len(event.text), max(event.at, event.until)):
            self._events.append(event)
        else:
            self._num_events_left_out += 1


def _admitted(seq: Sequence, at: float) -> SequenceEvent:
    counts = seq.num_tokens, max(0, seq.num_cached_tokens)
    return SequenceEvent(at, "admitted", seq.request_id, seq.sequence_idx, seq.row, *counts)


def _in_row(seq: Sequence) -> InRow:
    request = seq.request
    counts = request.num_prompt_tokens, seq.num_computed_tokens, seq.num_outputs
    return InRow(seq.row, seq.request_id, seq.sequence_idx, request.arrived, *counts)


def _waiting(seq: Sequence, why: str) -> Waiting:
    request = seq.request
    return Waiting(seq.request_id, seq.sequence_idx, request.arrived, request.num_prompt_tokens, why[:_MAX_TEXT])


def _totals(scheduler: Scheduler) -> dict[str, int]:
    totals = scheduler.totals
    return {
        "steps": totals.num_steps,
        "admitted": totals.num_admitted,
        "completed": totals.num_completed,
        "preemptions": totals.num_preemptions,
        "prompt_tokens": totals.num_prompt_tokens,
        "cached_tokens": totals.num_cached_tokens,
        "output_tokens": totals.num_output_tokens,
        "device_us": totals.device_us,
    }
