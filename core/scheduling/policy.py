"""Whose turn it is, as far as rows and pages are taken from some for others."""

from collections.abc import Iterable
from operator import attrgetter

from penstock.core.sequences.sequence import Request, Sequence

_by_order = attrgetter("order")


class Policy:
    """First come, first served; the base of all other orders, which a part may bring (`SchedulerPart.policy`).

    It has no keys: an order that sorts by keys sets `Request.level`.
    """

    preempts = False
    """Whether a waiting sequence takes the row of a running one that is on a greater level."""

    def takes_rows(self, waiting: Sequence) -> bool:
        """Return whether the head of the queue takes any row, if the policy preempts. Called before `victim`."""
        return True

    def yields(self, running: Sequence, waiting: Sequence) -> bool:
        """Return whether the victim gives its row to the head of the queue, if the policy preempts."""
        return running.request.level > waiting.request.level

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Return the running sequence to preempt when pages or rows run out; there is at least one."""
        return max(running, key=_by_order)

    def predicted_outputs(self, request: Request) -> float | None:
        """Return the predicted output tokens of a sequence of the request; None: no prediction.

        Used to estimate when a row will come free.
        """
        return None
