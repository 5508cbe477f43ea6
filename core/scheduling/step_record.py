"""The scheduler's part of the step trace: what one step does and why. Created only while a trace is written.

A sequence is named by its request id and its index.
"""

from collections.abc import Sequence as ListOf
from typing import NamedTuple

from msgspec import Struct

from penstock.core.kv.kv_pages import KVPages
from penstock.core.sequences.sequence import Sequence
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.core.steps.plan_builder import DecodeBatch, PlanBuilder
from penstock.ipc.messages import StepPlan

MAX_WAITING_SHOWN = 64
SIBLING = "sibling's prompt"
IN_LINE = "behind the first"
JUST_CAME = "just came"
GRAMMAR = "its grammar is being prepared"
ON_TRIAL = "a worker died: others are tried first"


class Admission(Struct, frozen=True, gc=False):
    """A sequence that enters a row in this step."""

    request_id: str
    sequence_idx: int
    row: int
    num_tokens: int  # known ids
    num_reused_tokens: int  # of them not computed: prefix cache, or a sibling's prompt
    is_fork: bool


class Preemption(Struct, frozen=True, gc=False):
    """A running sequence that lost its pages."""

    request_id: str
    sequence_idx: int
    reason: str


class StepRecord(Struct, frozen=True):
    """Everything about one step except the times, which the engine loop knows."""

    num_rows: int
    num_tokens: int
    rows: list[tuple[str, int, int]]  # (request id, index, chunk size), in batch order
    admitted: list[Admission]
    preempted: list[Preemption]
    free_pages: int
    cached_pages: int
    used_pages: int
    num_waiting: int
    waiting: list[tuple[str, int, str]]  # (request id, index, reason), the first MAX_WAITING_SHOWN in policy order
    waiting_reasons: dict[str, int]  # of all
    predicted_us: int  # time of a step with prompts, under --max-prefill-ms; 0: unknown. `forward_us` is the actual one


class ScheduledStep(NamedTuple):
    """A plan for the worker, its record if requested, and the sequences that got their first row."""

    plan: StepPlan
    record: StepRecord | None
    newcomers: ListOf[Sequence] = ()


def waiting_reasons(waiting: WaitingQueue, blocked_by: str) -> dict[str, int]:
    """Why sequences wait, and how many for each reason; `blocked_by` is why the head of the queue does."""
    head = waiting.head()
    parked = waiting.parked()
    num_parked = sum(len(request.waiting) for request in parked)
    num_held = sum(len(request.waiting) for request in waiting.held())
    num_after_siblings = sum(len(request.waiting) for request in parked if request.running)
    reasons = {
        SIBLING: num_after_siblings,
        ON_TRIAL: num_parked - num_after_siblings,
        GRAMMAR: num_held,
        blocked_by or JUST_CAME: int(head is not None),
        IN_LINE: waiting.num_seqs - num_parked - num_held - (head is not None),
    }
    return {reason: count for reason, count in reasons.items() if count}


def make_record(
    decodes: DecodeBatch,
    builder: PlanBuilder,
    admitted: list[Admission],
    preempted: list[Preemption],
    kv: KVPages,
    waiting: WaitingQueue,
    blocked_by: str,
    predicted_us: int,
) -> StepRecord:
    """Describe a step whose plan has just been made; `blocked_by` is why the head of the queue waits."""
    counts = [0] * len(decodes.seqs) if builder.drafts is None else builder.drafts.counts
    rows = [(seq.request_id, seq.sequence_idx, 1 + count) for seq, count in zip(decodes.seqs, counts, strict=True)]
    rows += [(chunk.seq.request_id, chunk.seq.sequence_idx, chunk.num_new) for chunk in builder.chunks]
    head = waiting.head()
    shown = [
        (seq.request_id, seq.sequence_idx, _parked_for(seq, waiting) or (blocked_by if seq is head else IN_LINE))
        for seq in waiting.first(MAX_WAITING_SHOWN)
    ]
    return StepRecord(
        num_rows=len(rows),
        num_tokens=sum(num_new for _, _, num_new in rows),
        rows=rows,
        admitted=admitted,
        preempted=preempted,
        free_pages=kv.pool.num_free,
        cached_pages=kv.pool.num_cached,
        used_pages=kv.pool.num_used,
        num_waiting=waiting.num_seqs,
        waiting=shown,
        waiting_reasons=waiting_reasons(waiting, blocked_by),
        predicted_us=predicted_us,
    )


def _parked_for(seq: Sequence, waiting: WaitingQueue) -> str:
    request = seq.request
    if waiting.is_held(request):
        return GRAMMAR
    return "" if not request.is_parked else SIBLING if request.running else ON_TRIAL
