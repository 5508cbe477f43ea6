"""Fair shares of tokens among tenants."""

from collections.abc import Collection, Iterable
from heapq import heappop, heappush, heapreplace
from itertools import count

from penstock.core.sequences.sequence import Request, Sequence
from penstock.core.steps.plan_builder import DecodeBatch, InFlightStep
from penstock.parts.policies.scheduler.policy import Policy

_PROMPT_COST, _OUTPUT_COST = 1.0, 2.0
"""Costs of a token, as in the paper."""

_MAX_IDLE = 4096
"""With more idle counters, those at or below the least service are dropped: they would be lifted to it anyway."""


class Fair(Policy):
    """By virtual token counters (Y. Sheng et al., Fairness in Serving Large Language Models, OSDI 2024).

    The tenant that has had the least service per weight goes first; its own requests go in turns, as under fcfs.

    Service is the number of computed prompt tokens, plus twice the output tokens. A prompt is charged when it gets a
    row, an output while it comes, so its length need not be known. A tenant that had nothing waiting is lifted to the
    least counter of those that have: unused service is not saved up. The tenant with the most service is preempted.

    There are two bounds. Between tenants that both have something waiting, the difference in service per weight stays
    below twice the larger of a prompt and of the outputs of all rows. And a tenant that has had something waiting but
    no turn for `max_delay` seconds has the next one, however many others come and go.
    """

    max_delay = 30.0

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._heap: list[tuple[float, int, str]] = []  # (service or less, number, tenant); one valid entry per tenant
        self._numbers = count()
        self._since: dict[str, float] = {}  # when each had its last turn or began to wait, longest ago first
        self._least = 0.0  # service of the tenant whose turn it was last
        self._batch: DecodeBatch | None = None
        self._charges: list[tuple[_Account, float]] = []  # for a step of that batch

    def service(self, tenant: str) -> float:
        """Return the service that a tenant has had, in tokens per weight."""
        return self._account(tenant).service

    def tenant_waits(self, tenant: str, tenants: Collection[str]) -> None:
        account = self._account(tenant)
        least = self._account(self._first_by_service(tenants)).service if tenants else self._least
        account.service = max(account.service, least)
        account.number = next(self._numbers)
        heappush(self._heap, (account.service, account.number, tenant))
        self._had_turn(tenant)
        if len(self._accounts) > 2 * len(tenants) + _MAX_IDLE:
            self._forget({tenant, *tenants})

    def first_tenant(self, tenants: Collection[str]) -> str:
        since = self._since
        while since:
            longest = next(iter(since))
            if longest in tenants:
                if self.view.now - since[longest] >= self.max_delay:
                    return longest
                break
            del since[longest]
        first = self._first_by_service(tenants)
        self._least = self._account(first).service
        return first

    def on_admitted(self, request: Request, num_tokens: int) -> None:
        self._had_turn(request.tenant)
        self._account(request.tenant).service += _PROMPT_COST * num_tokens / request.weight

    def on_step(self, step: InFlightStep) -> None:
        if step.decodes is not self._batch:  # the batch is the same object while no sequence comes or goes
            self._batch = step.decodes
            costs: dict[str, float] = {}
            for seq in step.decodes.seqs:
                request = seq.request
                costs[request.tenant] = costs.get(request.tenant, 0.0) + _OUTPUT_COST / request.weight
            self._charges = [(self._account(tenant), cost) for tenant, cost in costs.items()]
        for account, cost in self._charges:
            account.service += cost
        for chunk in step.chunks:
            if chunk.samples:
                request = chunk.seq.request
                self._account(request.tenant).service += _OUTPUT_COST / request.weight

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=lambda seq: (self.service(seq.request.tenant), seq.order))

    def _account(self, tenant: str) -> "_Account":
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(self._least)
        return account

    def _had_turn(self, tenant: str) -> None:
        self._since.pop(tenant, None)
        self._since[tenant] = self.view.now

    def _first_by_service(self, tenants: Collection[str]) -> str:
        """Return the tenant with the least service: counters only grow, so the first current heap entry is it."""
        heap = self._heap
        while True:
            if not heap:  # this level's entries were dropped while another level was queried
                for name in tenants:
                    dropped = self._account(name)
                    dropped.number = next(self._numbers)
                    heappush(heap, (dropped.service, dropped.number, name))
            service, number, tenant = heap[0]
            account = self._accounts.get(tenant)
            if account is None or account.number != number or tenant not in tenants:
                heappop(heap)
            elif account.service > service:
                heapreplace(heap, (account.service, number, tenant))
            else:
                return tenant

    def _forget(self, tenants: Collection[str]) -> None:
        self._batch = None
        for tenant in [name for name, account in self._accounts.items() if account.service <= self._least]:
            if tenant not in tenants:
                del self._accounts[tenant]


class _Account:
    """A tenant's counter."""

    __slots__ = ("number", "service")

    def __init__(self, service: float) -> None:
        self.service = service
        self.number = -1  # of its entry in the heap
