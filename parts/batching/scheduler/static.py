"""Static batching: waiting requests begin together; the next batch begins when all of them have ended."""

from collections.abc import Iterable
from math import inf

from penstock.core.sequences.sequence import Request
from penstock.parts.batching.options import BatchingOptions


class Static:
    """A batch of all waiting requests that fit; the base of all kinds that run batches one after the other."""

    def __init__(self, options: BatchingOptions) -> None:
        """Keep the options that the kind needs."""

    def begins_at(self, num_waiting: int, size: int, oldest: float) -> float:
        """Return when the next batch begins if no more requests come; a time that is not in the future means now.

        Args:
            num_waiting: waiting sequences, at least one.
            size: sequences of a full batch.
            oldest: when the first of their requests arrived, in seconds.
        """
        return -inf

    def on_finished(self, request: Request, num_outputs: int) -> None:
        """Called when a sequence of the request that had a row has ended with `num_outputs` tokens of output."""

    def choose(self, waiting: Iterable[Request], size: int) -> list[Request]:
        """Return the requests of the next batch, out of the waiting ones in the order of their turns.

        The first waiting one is always included, so that every request's turn comes. A request's sequences are in one
        batch; a request with more sequences than `size` is a batch of its own.
        """
        return first_that_fit(waiting, size)


def first_that_fit(requests: Iterable[Request], size: int) -> list[Request]:
    """Return the first request, and those after it until one has too many sequences for the rest of `size`."""
    chosen: list[Request] = []
    for request in requests:
        size -= len(request.waiting)
        if chosen and size < 0:
            break
        chosen.append(request)
    return chosen
