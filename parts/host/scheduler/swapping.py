"""How a preempted sequence comes back: from a copy of its pages on the host, or computed again.

`auto` compares two times: copying its pages there and back, at the measured speed of the worker's copies, and computing
its tokens, as `PrefillPace` has learned it. Until both are known, it copies.
"""

from penstock.core.sequences.limits import WorkerLimits
from penstock.core.sequences.sequence import Sequence
from penstock.core.steps.prefill_pace import PrefillPace
from penstock.ipc.messages import StepResult
from penstock.parts.host.options import PreemptionKind
from penstock.parts.host.scheduler.tiers import Tiers

_FORGETTING = 0.9
_NUM_FIRST_PAGES = 16
"""The copy speed that the worker measures at its start has the weight of a step that copied this many pages."""


class Swapping:
    """Decides for each preempted sequence whether to swap it out, and does so."""

    __slots__ = ("_kind", "_num_bytes", "_num_us", "_pace", "_page_bytes", "_step_tokens", "_tiers")

    def __init__(self, kind: PreemptionKind, tiers: Tiers, limits: WorkerLimits, pace: PrefillPace) -> None:
        self._kind = kind
        self._tiers = tiers
        self._page_bytes = limits.page_bytes
        self._step_tokens = limits.max_num_batched_tokens
        self._pace = pace
        self._num_bytes = float(_NUM_FIRST_PAGES * limits.page_bytes)  # of recent copies
        self._num_us = self._num_bytes * 1e6 / limits.host_copy_speed if limits.host_copy_speed else 0.0

    def swap_out(self, seq: Sequence) -> bool:
        """Copy a running sequence's pages to the host before it loses them, if that pays and there is room."""
        if seq.needs_all_positions:
            return False
        if self._kind == "recompute" or (self._kind == "auto" and not self._pays(seq)):
            return False
        return self._tiers.swap_out(seq)

    def swap_us(self, num_pages: int) -> float:
        """Return the microseconds to copy this many pages there and back; 0 if unknown."""
        return 2 * num_pages * self._page_bytes * self._num_us / self._num_bytes if self._num_bytes else 0.0

    def note(self, result: StepResult) -> None:
        """Learn the speed of copies from a result."""
        self._num_bytes = self._num_bytes * _FORGETTING + result.num_copied_pages * self._page_bytes
        self._num_us = self._num_us * _FORGETTING + result.num_copy_us
        self._tiers.totals.num_copy_us += result.num_copy_us

    def _pays(self, seq: Sequence) -> bool:
        recompute_us = self._pace.recompute_us(seq.num_settled_tokens, self._step_tokens)
        return not recompute_us or self.swap_us(self._tiers.num_pages_of(seq)) < recompute_us
