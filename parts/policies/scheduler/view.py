"""What a policy may see of its scheduler. Reading changes nothing: it takes no page, row or turn."""

from collections.abc import Callable, Iterator
from typing import Protocol

from penstock.config.options import SchedulerOptions
from penstock.core.kv.kv_pages import KVPages
from penstock.core.sequences.limits import WorkerLimits
from penstock.core.sequences.sequence import Request, Sequence
from penstock.core.steps.prefill_pace import PrefillPace


class Rows(Protocol):
    """The running sequences."""

    num_entered: int  # ever
    num_left: int  # ever
    decodes: dict[Sequence, None]  # those that have launched a first sample, but not the last one

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class View:
    """Given to a policy once (`Policy.attach`); always shows the current state."""

    kv: KVPages  # of the current worker
    running: Rows  # of the current worker
    max_num_seqs: int  # rows of the current worker
    max_num_batched_tokens: int  # of its steps

    __slots__ = ("_pace", "kv", "max_num_batched_tokens", "max_num_seqs", "options", "renew", "running")

    def __init__(self, options: SchedulerOptions, pace: PrefillPace, renew: Callable[[Request], None]) -> None:
        self.options = options
        self._pace = pace
        self.renew = renew
        """Asks for a request's key to be recomputed soon; each step recomputes a bounded number."""

    def follow(self, kv: KVPages, running: Rows, limits: WorkerLimits) -> None:
        """Show another worker, with these limits."""
        self.kv = kv
        self.running = running
        self.max_num_seqs = limits.max_num_seqs
        self.max_num_batched_tokens = limits.max_num_batched_tokens

    @property
    def now(self) -> float:
        """When the scheduler was last called, in seconds."""
        return self.kv.now

    def num_cached_tokens(self, request: Request) -> int:
        """Return how many tokens of the request's prefix are in the cache now. O(their pages)."""
        seqs = request.waiting or request.running
        return self.kv.find_prefix(seqs[0]).num_pages * self.kv.page_size

    def prefill_us(self, num_tokens: int, start: int = 0) -> float:
        """Return the microseconds that a prompt's chunk from position `start` on adds to a step; 0: unknown."""
        return self._pace.chunk_us(start, num_tokens) if self._pace.is_known else 0.0

    def decode_us(self, num_rows: int, num_context_tokens: int) -> float:
        """Return the microseconds of a step of decodes with this many tokens in their contexts; 0: unknown."""
        return self._pace.decodes_us(num_rows, num_context_tokens) if self._pace.is_known else 0.0
