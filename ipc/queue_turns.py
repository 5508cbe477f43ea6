"""How many turns a newcomer waits for: what `core/sequences/waiting_queue.py` does, from its counts alone."""

from collections.abc import Iterable

from penstock.ipc.messages import WaitingTenant


def turns_before(tenant: str, waiting: Iterable[WaitingTenant]) -> int:
    """Sequences that get a row before the first one of a new group of `tenant` does.

    Each of its own groups has a turn before, and between two turns of this tenant each other one has one, as long as
    it has something waiting.
    """
    others = []
    num_own = 0
    for each in waiting:
        if each.tenant == tenant:
            num_own = each.num_groups
        else:
            others.append(each.num_seqs)
    return num_own + sum(min(num_seqs, num_own + 1) for num_seqs in others)
