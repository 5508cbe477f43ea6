"""Shortest job first, by predicted work."""

from math import log2

from penstock.core.sequences.output_lengths import LengthPredictor
from penstock.core.sequences.sequence import Key, Request
from penstock.parts.policies.scheduler.policy import Policy
from penstock.parts.policies.scheduler.work import predicted_us

_CLASSES_PER_DOUBLING = 2


class ShortestJobFirst(Policy):
    """By predicted work, which gives the lowest mean latency.

    Requests of about equal work (within a factor of the square root of two) are one class, in which tenants take turns.
    A running request never loses its row to a shorter job.

    The prediction is made when a request arrives (`work.py`, `core/sequences/output_lengths.py`).

    The bound: a request that has waited for `max_delay` seconds comes before all classes.
    """

    max_delay = 60.0

    def __init__(self) -> None:
        self._lengths = LengthPredictor()

    def key(self, request: Request, now: float) -> Key:
        return (work_class(predicted_us(request, self._lengths, self.view)),)

    def on_finished(self, request: Request, num_outputs: int) -> None:
        self._lengths.learn(request, num_outputs)

    def predicted_outputs(self, request: Request) -> float:
        return self._lengths.predict(request)


def work_class(num_us: float) -> int:
    """Return the number of the class to which this much work belongs."""
    return int(_CLASSES_PER_DOUBLING * log2(max(num_us, 1.0)))
