"""How many turns a new request waits for: the order of `core/sequences/waiting_queue.py`, computed from its counts."""

from collections.abc import Iterable

from penstock.ipc.messages import WaitingTenant


def turns_before(tenant: str, waiting: Iterable[WaitingTenant]) -> int:
    """Return how many sequences get a row before the first one of a new group of `tenant` does.

    Each of the tenant's own groups has a turn first. Between two turns of this tenant, each other tenant has one, as
    long as it has something waiting.
    """
    others = []
    num_own = 0
    for each in waiting:
        if each.tenant == tenant:
            num_own = each.num_groups
        else:
            others.append(each.num_seqs)
    return num_own + sum(min(num_seqs, num_own + 1) for num_seqs in others)
