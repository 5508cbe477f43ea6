"""Dynamic batching: a batch begins when it is full, or when its first request has waited long enough."""

from math import inf

from penstock.parts.batching.options import BatchingOptions
from penstock.parts.batching.scheduler.static import Static


class Dynamic(Static):
    """Like static batching, but a batch that is not full waits for more requests."""

    def __init__(self, options: BatchingOptions) -> None:
        self._seconds = options.batch_wait_ms / 1000

    def begins_at(self, num_waiting: int, size: int, oldest: float) -> float:
        return -inf if num_waiting >= size else oldest + self._seconds
