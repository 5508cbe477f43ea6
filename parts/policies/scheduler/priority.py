"""The request's own priority."""

from penstock.core.sequences.sequence import Key, Request
from penstock.parts.policies.scheduler.policy import Policy


class Priority(Policy):
    """By the request's own priority number, lowest first, equal ones in turns; takes rows from less urgent ones.

    The bound: a request that has waited for `max_delay` seconds comes before all priorities. It then waits for the
    next free row, and takes none.
    """

    preempts = True
    max_delay = 300.0

    def key(self, request: Request, now: float) -> Key:
        return (request.priority,)
