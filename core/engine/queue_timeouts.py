"""Requests that wait too long for their first row. Pure; the caller has the clock."""

from collections import deque

from penstock.core.scheduling.scheduler import Deltas, Scheduler


class QueueTimeouts:
    """When each request came, oldest first. Those that have had a row once are not judged: they were admitted."""

    __slots__ = ("_arrivals", "_seconds")

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long a request may wait; 0 for as long as it takes."""
        self._seconds = seconds
        self._arrivals: deque[tuple[float, str]] = deque()  # (monotonic seconds, request id)

    def note(self, now: float, request_id: str) -> None:
        """A new request has been queued."""
        if self._seconds:
            self._arrivals.append((now, request_id))

    def expire(self, now: float, scheduler: Scheduler) -> Deltas:
        """End those whose time is over; the deltas that say so."""
        deltas: Deltas = {}
        while self._arrivals and now - self._arrivals[0][0] > self._seconds:
            _, request_id = self._arrivals.popleft()
            request = scheduler.requests.get(request_id)
            if request is None or any(seq.num_cached_tokens >= 0 for seq in (*request.running, *request.waiting)):
                continue
            error = f"the request waited in the queue for more than {self._seconds:g} s"
            ended = [seq.error_delta(error, "queue_timeout") for seq in request.waiting]
            scheduler.abort(request_id)
            deltas.setdefault(request.owner, []).extend(ended)
        return deltas
