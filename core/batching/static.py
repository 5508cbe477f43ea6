"""Static batching: what waits begins together, and the next batch begins when the last of it has ended."""

from collections.abc import Iterable
from math import inf

from penstock.core.config.options import SchedulerOptions
from penstock.core.sequences.sequence import Request


class Static:
    """As many as wait, at most a batch; the base of all kinds that run batches one after the other."""

    def __init__(self, options: SchedulerOptions) -> None:
        """Keep of the options what the kind needs."""

    def begins_at(self, num_waiting: int, size: int, oldest: float) -> float:
        """Return when the next batch begins if no more requests come: now, if the time is not in the future.

        Args:
            num_waiting: sequences that wait, at least one.
            size: sequences of a full batch.
            oldest: when the first of their requests arrived, in seconds.
        """
        return -inf

    def on_finished(self, request: Request, num_outputs: int) -> None:
        """Called when a sequence of the request that had a row has ended with so many tokens of output."""

    def choose(self, waiting: Iterable[Request], size: int) -> list[Request]:
        """Return the requests of the next batch: some of those that wait, which come in the order of their turns.

        The first one is always among them, so that everybody's turn comes. A request's sequences are in one batch;
        one with more of them than a batch has (`size`) is a batch of its own.
        """
        return first_that_fit(waiting, size)


def first_that_fit(requests: Iterable[Request], size: int) -> list[Request]:
    """Return the first one, and those after it until one has too many sequences for what is left of `size`."""
    chosen: list[Request] = []
    for request in requests:
        size -= len(request.waiting)
        if chosen and size < 0:
            break
        chosen.append(request)
    return chosen
