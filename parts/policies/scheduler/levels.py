"""The levels of live requests under a policy with keys: computed on arrival, and again only when needed.

No work here is done for each request in each step. A key is recomputed

    at the time that the policy gave (`Policy.renews_at`), from a heap of times;
    when the policy asks for it (`View.renew`), at most RENEWALS_A_STEP in a step;
    never again, once the request has waited for the policy's `max_delay`: it then has the empty key, which comes before
    all others. On this level requests take turns as under fcfs, and their rows cannot be taken.

`max_delay` is compared with the total time that a request has waited, including waits after preemptions.
"""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from penstock.core.sequences.intake import Refusal
from penstock.core.sequences.sequence import Key, Request
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.parts.policies.scheduler.policy import Policy

OVERDUE: Key = ()
RENEWALS_A_STEP = 8


class Levels:
    """Sets `Request.level`, and keeps the queue sorted by it."""

    __slots__ = (
        "_asked", "_checked", "_max_delay", "_numbers", "_policy", "_refused", "_refuses", "_renews", "_times",
        "_waiting",
    )  # fmt: skip

    def __init__(self, policy: Policy, waiting: WaitingQueue) -> None:
        self._policy = policy
        self._waiting = waiting
        self._max_delay = policy.max_delay
        self._renews = policy.overrides("renews_at")
        self._times: list[tuple[float, int, Request]] = []  # heap; valid if equal to the request's `renews_at`
        self._numbers = count()
        self._refuses = policy.overrides("refusal")
        self._refused: list[tuple[Request, Refusal]] = []
        self._asked: dict[Request, None] = {}
        self._checked: tuple[Request | None, int] = (None, 0)

    def arrived(self, request: Request, now: float) -> Refusal | None:
        """Give a new request its level before it is queued; return a refusal if the policy refuses it."""
        if self._refuses and request.arrived and (refusal := self._policy.refusal(request, now)) is not None:
            return refusal
        request.level = request.base_level + self._policy.key(request, now)
        self.waits(request, now)
        return None

    def waits(self, request: Request, now: float) -> None:
        """A sequence of the request waits: it is new, was preempted, or was paused until now."""
        if request.waits_since is None and not request.is_overdue:
            request.waits_since = now
            self._look_again(request, now)

    def admitted(self, request: Request, now: float) -> None:
        """A sequence of the request has got a row."""
        if not request.waiting and request.waits_since is not None:
            request.seconds_waited += now - request.waits_since
            request.waits_since = None

    def renew(self, request: Request) -> None:
        """Recompute a request's key in one of the next steps."""
        self._asked[request] = None

    def advance(self, now: float, requests: Mapping[str, Request]) -> bool:
        """Bring the levels up to date before a step; return whether the first level has changed."""
        has_changed = False
        if len(self._times) > 2 * len(requests) + 64:
            self._forget_outdated()
        for request in self._due(now):
            if request.waiting and not request.is_paused:
                has_changed |= self._set(request, now)
            else:
                request.waits_since = None
        for _ in range(min(len(self._asked), RENEWALS_A_STEP)):
            request = next(iter(self._asked))
            del self._asked[request]
            if request.waiting and not request.is_paused:
                has_changed |= self._set(request, now)
        if self._policy.changes:
            keys = {request: self._key(request, now) for request in requests.values()}
            if any(request.level != level for request, level in keys.items()):
                self._waiting.change_levels(keys)
                has_changed = True
        return has_changed

    def returns(self, request: Request) -> None:
        """A sequence of the request has lost its row: the key may have changed since it got the row."""
        self._asked[request] = None

    def take_refused(self) -> list[tuple[Request, Refusal]]:
        """Return the requests that the policy has refused since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def check_head(self, now: float, num_left: int) -> None:
        """Before admissions, recompute the head's key, and the next head's if that changes the order.

        `num_left`: sequences that ever left their row. While it stays the same, the same head is not checked again.
        """
        if not self._policy.checks_head:
            return
        for _ in range(RENEWALS_A_STEP):
            head = self._waiting.head()
            if head is None or (head.request, num_left) == self._checked:
                return
            self._checked = (head.request, num_left)
            if not self._set(head.request, now):
                return

    def _due(self, now: float) -> list[Request]:
        times, found = self._times, []
        while times and times[0][0] <= now:
            at, _, request = heappop(times)
            if at == request.renews_at and request.is_live:
                request.renews_at = inf
                found.append(request)
        return found

    def _set(self, request: Request, now: float) -> bool:
        """Recompute a request's key, unless it is refused; return whether it joined or left the first level."""
        if self._refuses and request.arrived and request.is_new:
            refusal = self._policy.refusal(request, now)
            if refusal is not None:
                self._refused.append((request, refusal))
                return False
        level = self._key(request, now)
        is_change = level != request.level
        if is_change:
            is_change = request.level == self._waiting.first_level
            self._waiting.change_level(request, level)
            is_change |= level == self._waiting.first_level
        self._look_again(request, now)
        return is_change

    def _key(self, request: Request, now: float) -> Key:
        if request.is_overdue or self._overdue_at(request) <= now:
            return request.base_level + OVERDUE
        return request.base_level + self._policy.key(request, now)

    def _overdue_at(self, request: Request) -> float:
        if request.waits_since is None:
            return inf
        return request.waits_since + self._max_delay - request.seconds_waited

    def _look_again(self, request: Request, now: float) -> None:
        if request.is_overdue:
            return
        at = self._overdue_at(request)
        if self._renews:
            at = min(at, self._policy.renews_at(request, now))
        if at < inf and at != request.renews_at:
            request.renews_at = at
            heappush(self._times, (at, next(self._numbers), request))

    def will_be_overdue(self, request: Request) -> bool:
        """Return whether a waiting request will be checked again in time; for checks."""
        at = self._overdue_at(request)
        has_entry = any(entry[0] == request.renews_at and entry[2] is request for entry in self._times)
        return at == inf or (request.renews_at <= at and has_entry)

    def _forget_outdated(self) -> None:
        self._times = [entry for entry in self._times if entry[2].is_live and entry[2].renews_at == entry[0]]
        heapify(self._times)
