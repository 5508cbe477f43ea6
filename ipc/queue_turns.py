"""How many turns a new request waits for: the order of `core/sequences/waiting_queue.py`, computed from its counts."""

from collections import Counter
from collections.abc import Iterable, Iterator

from penstock.ipc.messages import WaitingTenant


class WaitingCounts:
    """How much of each tenant's work waits. Nothing here but `tenants` and `busiest` grows with the number of tenants.

    Tenants are counted by the number of their sequences, because that is all that matters of the others: there are at
    most as many different numbers as the square root of twice the sequences.
    """

    __slots__ = ("_groups", "_num_with", "_seqs")

    def __init__(self, waiting: Iterable[WaitingTenant] = ()) -> None:
        self._groups: dict[str, int] = {}
        self._seqs: dict[str, int] = {}
        self._num_with: Counter[int] = Counter()  # tenants by number of sequences
        for each in waiting:
            self.add(each.tenant, each.num_seqs, each.num_groups)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._groups

    def add(self, tenant: str, num_seqs: int, num_groups: int) -> None:
        """Count more of a tenant's work, or with negative numbers less."""
        groups, had = self._groups.get(tenant, 0) + num_groups, self._seqs.get(tenant, 0)
        if had:
            self._num_with[had] -= 1
            if not self._num_with[had]:
                del self._num_with[had]
        if not groups:
            self._groups.pop(tenant, None)
            self._seqs.pop(tenant, None)
            return
        self._groups[tenant], self._seqs[tenant] = groups, had + num_seqs
        if had + num_seqs:
            self._num_with[had + num_seqs] += 1

    def turns_before(self, tenant: str) -> int:
        """Return how many sequences get a row before the first one of a new group of `tenant` does.

        Each of the tenant's own groups has a turn first. Between two turns of this tenant, each other tenant has one,
        as long as it has something waiting.
        """
        num_own = self._groups.get(tenant, 0)
        num_each = num_own + 1
        num_all = sum(count * min(num_seqs, num_each) for num_seqs, count in self._num_with.items())
        return num_own + num_all - min(self._seqs.get(tenant, 0), num_each)

    def busiest(self) -> str:
        """Return the tenant with the most groups; "" if nothing waits."""
        return max(self._groups, key=self._groups.__getitem__, default="")

    def tenants(self) -> Iterator[WaitingTenant]:
        """Yield the counts of each tenant."""
        return (WaitingTenant(name, self._seqs[name], groups) for name, groups in self._groups.items())
