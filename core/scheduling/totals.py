"""The scheduler's counters since its start; they survive workers."""

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """Each only grows."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_admitted: int = 0  # sequences, at their first admission
    num_completed: int = 0  # sequences that ended in their row; not those whose clients left
    num_prompt_tokens: int = 0  # of sequences at their first admission
    num_cached_tokens: int = 0  # of these, not computed: prefix cache, or a sibling's prompt
    num_output_tokens: int = 0
    num_invalid_logits: int = 0  # sequences that ended because no token could be drawn from their logits
    num_dropped_tokens: int = 0  # sampled for sequences that were gone, or had left their row since
