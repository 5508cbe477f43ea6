"""Dynamic batching: a batch begins when it is full, or when its first request has waited long enough."""

from math import inf

from penstock.core.batching.static import Static

LONGEST_WAIT = 0.1
"""Seconds from a batch's first request on: who asks hardly notices them, and a burst arrives in them."""


class Dynamic(Static):
    """Like static batching, but a batch that is not full waits for more requests."""

    def begins_at(self, num_waiting: int, size: int, oldest: float) -> float:
        return -inf if num_waiting >= size else oldest + LONGEST_WAIT
