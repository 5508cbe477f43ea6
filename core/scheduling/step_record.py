"""What a step does and why, for the step trace and others; and the kinds of reasons for which requests wait.

A `StepRecord` is made only while somebody wants it; which sequences came and were preempted is always noted.

A sequence is named by its request id and its index.
"""

from collections import Counter

from msgspec import Struct

from penstock.core.kv.host_tier import HostTier
from penstock.core.kv.kv_pages import KVPages
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.core.steps.plan_builder import DecodeBatch, PlanBuilder
from penstock.ipc.messages import FROM_HOST, TO_HOST, StepPlan

MAX_WAITING_SHOWN = 64
SIBLING = "sibling's prompt"
IN_LINE = "behind the first"
JUST_CAME = "just came"
ADAPTER = "its adapter is being read, or waits for room"
GRAMMAR = "its grammar is being prepared"
DISK = "its prefix is being read from the disk"
IMAGE = "its images are being encoded"
PREFILL = "another engine computes its prompt"
ON_TRIAL = "a worker died: others are tried first"


def count_text(number: int, what: str) -> str:
    """A number of things, as reasons tell it."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def duration_text(us: float) -> str:
    """Microseconds, as reasons tell them."""
    return f"{us / 1e6:.1f} s" if us >= 1e6 else f"{max(us / 1e3, 1):.0f} ms"


class Blocked:
    """Why the head of the queue, and with it all others, gets no row in a step; parts have reasons of their own."""

    BUDGET = "token budget"
    NO_ROW = "no free row"
    NO_PAGES = "no free pages"
    NO_PAGES_SINCE = "no free pages since a preemption"
    TARGETS = "targets of those that run"


class Admission(Struct, frozen=True, gc=False):
    """A sequence that enters a row in this step."""

    request_id: str
    sequence_idx: int
    row: int
    num_tokens: int  # known ids
    num_reused_tokens: int  # of them not computed: from the prefix cache, the host's pages, or a sibling's prompt
    is_fork: bool
    num_host_pages: int = 0  # copied back from the host


class Preemption(Struct, frozen=True, gc=False):
    """A running sequence that lost its pages."""

    request_id: str
    sequence_idx: int
    reason: str
    is_swapped: bool = False  # True: to the host; False: it will be computed again


class HostRecord(Struct, frozen=True, gc=False):
    """The host's pages after a step was planned, and the pages that it copies."""

    free_pages: int
    cached_pages: int
    held_pages: int
    to_host: int
    from_host: int


class StepRecord(Struct, frozen=True):
    """Everything about one step except its times, which the engine loop adds."""

    num_rows: int
    num_tokens: int
    rows: list[tuple[str, int, int]]  # (request id, index, chunk size), in batch order
    admitted: list[Admission]
    preempted: list[Preemption]
    free_pages: int
    cached_pages: int
    used_pages: int
    num_waiting: int
    waiting: list[
        tuple[str, int, str]
    ]  # (request id, index, reason with figures), the first MAX_WAITING_SHOWN by turns
    waiting_reasons: dict[str, int]  # of all waiting sequences
    predicted_us: int  # time of a step with prompts, under --max-prefill-ms; 0: unknown. `forward_us` is the actual one
    host: HostRecord | None = None  # None: there is no host tier
    num_drafts: list[int] = []  # tokens that may be guessed for each of the first rows; empty: none
    why_drafts: str = ""  # why that many


class ScheduledStep(Struct, frozen=True):
    """A plan for the worker, the sequences that entered or lost a row with it, and its record if requested."""

    plan: StepPlan
    record: StepRecord | None
    admitted: list[Admission]
    preempted: list[Preemption]


def waiting_reasons(waiting: WaitingQueue, blocked_by: str) -> dict[str, int]:
    """How many sequences wait for each reason; `blocked_by` is why the head of the queue waits."""
    head = waiting.head()
    parked = waiting.parked()
    num_parked = sum(len(request.waiting) for request in parked)
    held = Counter[str]()
    for request, why in waiting.held().items():
        held[why] += len(request.waiting)
    num_after_siblings = sum(len(request.waiting) for request in parked if request.running)
    reasons = {
        SIBLING: num_after_siblings,
        ON_TRIAL: num_parked - num_after_siblings,
        **held,
        blocked_by or JUST_CAME: int(head is not None),
        IN_LINE: waiting.num_seqs - num_parked - held.total() - (head is not None),
    }
    return {reason: count for reason, count in reasons.items() if count}


def make_record(
    decodes: DecodeBatch,
    builder: PlanBuilder,
    admitted: list[Admission],
    preempted: list[Preemption],
    kv: KVPages,
    waiting: list[tuple[str, int, str]],
    waiting_reasons: dict[str, int],
    predicted_us: int,
    plan: StepPlan,
    why_drafts: str,
) -> StepRecord:
    """Describe a step whose plan has just been made; `waiting` are the first waiting sequences, with reasons."""
    rows = [(seq.request_id, seq.sequence_idx, 1) for seq in decodes.seqs]
    rows += [(chunk.seq.request_id, chunk.seq.sequence_idx, chunk.num_new) for chunk in builder.chunks]
    return StepRecord(
        num_rows=len(rows),
        num_tokens=sum(num_new for _, _, num_new in rows),
        rows=rows,
        admitted=admitted,
        preempted=preempted,
        free_pages=kv.pool.num_free,
        cached_pages=kv.pool.num_cached,
        used_pages=kv.pool.num_used,
        num_waiting=sum(waiting_reasons.values()),
        waiting=waiting,
        waiting_reasons=waiting_reasons,
        predicted_us=predicted_us,
        host=None if kv.tiers is None else _host_record(kv.tiers.host, plan.copy_tiers),
        num_drafts=[] if builder.drafts is None or not any(builder.drafts.counts) else builder.drafts.counts,
        why_drafts=why_drafts,
    )


def _host_record(host: HostTier, copies: bytes) -> HostRecord:
    return HostRecord(host.num_free, host.num_cached, host.num_held, copies.count(TO_HOST), copies.count(FROM_HOST))
