"""The scheduler's counters, and how they are sent to the frontends."""

from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from penstock.core.kv.kv_pages import KVPages
from penstock.core.scheduling.part import Parts
from penstock.core.scheduling.step_record import waiting_reasons
from penstock.core.sequences.limits import WorkerLimits
from penstock.core.sequences.sequence import Sequence
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.ipc.messages import EngineStats


@dataclass(slots=True)
class Totals:
    """Totals since the scheduler's start; they survive workers and only grow."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_admitted: int = 0  # sequences, at their first admission
    num_completed: int = 0  # sequences that ended in their row, except those whose clients left
    num_prompt_tokens: int = 0  # of sequences, counted at their first admission
    num_cached_tokens: int = 0  # of these, tokens not computed: from the prefix cache, or a sibling's prompt
    num_output_tokens: int = 0
    num_invalid_logits: int = 0  # sequences that ended because no token could be sampled from their logits
    num_dropped_tokens: int = 0  # sampled for sequences that had ended, or left their row, in the meantime
    device_us: int = 0  # the times of all steps that have returned


def engine_stats(
    limits: WorkerLimits,
    waiting: WaitingQueue,
    running: ListOf[Sequence],
    kv: KVPages,
    totals: Totals,
    blocked_by: str,
    parts: Parts,
    *,
    max_turns: int,
    is_ready: bool,
) -> EngineStats:
    """Return the current counts and the totals since the start; `blocked_by` is why the head of the queue waits."""
    num_pages = num_filled = num_prefill = 0
    for seq in running:
        num_pages += len(seq.page_ids)
        num_filled += seq.num_computed_tokens
        num_prefill += max(0, len(seq.token_ids) - seq.num_computed_tokens)
    return EngineStats(
        num_waiting=waiting.num_seqs,
        num_running=len(running),
        num_rows=limits.max_num_seqs,
        num_pages=limits.num_pages,
        num_free_pages=kv.pool.num_free,
        num_cached_pages=kv.pool.num_cached,
        num_used_pages=kv.pool.num_used,
        num_steps=totals.num_steps,
        num_preemptions=totals.num_preemptions,
        num_invalid_logits=totals.num_invalid_logits,
        num_prompt_tokens=totals.num_prompt_tokens,
        num_cached_tokens=totals.num_cached_tokens,
        num_output_tokens=totals.num_output_tokens,
        is_ready=is_ready,
        num_waiting_tokens=waiting.num_tokens,
        num_paused=waiting.num_paused_requests,
        num_dropped_tokens=totals.num_dropped_tokens,
        device_us=totals.device_us,
        num_page_slots=num_pages * kv.page_size,
        page_size=kv.page_size,
        num_unfilled_slots=max(num_pages * kv.page_size - num_filled, 0),
        waiting_reasons=waiting_reasons(waiting, blocked_by),
        waiting_tenants=waiting.tenants(),
        max_turns=max_turns,
        failed_tiers=limits.failed_tiers,
        num_prefill_tokens=num_prefill,
        snapshots=None if kv.snapshots is None else kv.snapshots.stats(),
        **parts.stats(),
    )
