"""Which running sequence gives its row to a waiting one. There are two reasons.

By level: under a policy that preempts, its victim yields if it has a higher level.

By share: rows of long sequences rarely become free. So that nobody keeps all others from a first token with them, a
tenant without a row takes one from the tenant with the most rows, and a group without one from the largest group of its
tenant, provided that the loser has many rows, and more than its share. The sequence that has had its row for the
longest time yields and goes to the end of the line, so that all of them make progress.
"""

from operator import attrgetter

from penstock.core.scheduling.running import RunningSet
from penstock.core.sequences.policy import Policy
from penstock.core.sequences.sequence import Sequence

_LEAST_ROWS = 2
_LEAST_PART = 8
"""A tenant with less than an eighth of all rows makes nobody wait."""

_order = attrgetter("order")


def by_level(head: Sequence, running: RunningSet, policy: Policy) -> Sequence | None:
    """Return the sequence that yields to a waiting one of a lower level, or None. None may be draining."""
    found = policy.victim(running) if len(running) else None
    return found if found is not None and found.request.level > head.request.level else None


def by_share(head: Sequence, running: RunningSet) -> Sequence | None:
    """Return the sequence that yields to a new one whose tenant, or group, has no row; or None."""
    request = head.request
    num_rows = len(running) + running.num_free_rows
    groups = running.rows_of
    if request.tenant not in groups:
        tenant, num_of_tenant = max(
            ((name, sum(each.values())) for name, each in groups.items()), key=lambda found: found[1], default=("", 0)
        )
        if num_of_tenant < _many(num_rows, len(groups)):
            return None
        group = max(groups[tenant], key=groups[tenant].__getitem__)
    else:
        tenant, own = request.tenant, groups[request.tenant]
        if request.group in own:
            return None
        group = max(own, key=own.__getitem__)
        if own[group] < _many(sum(own.values()), len(own)):
            return None
    candidates = [
        seq
        for seq in (*running.decodes, *running.prefills)
        if seq.request.tenant == tenant and seq.request.group == group
    ]
    # Levels come first: a sequence of a lower level than the new one keeps its row.
    candidates = [seq for seq in candidates if seq.request.level >= request.level]
    return min(candidates, key=_order, default=None)


def _many(num_rows: int, num_holders: int) -> int:
    """The number of rows that is more than a share of these, with one more holder."""
    return max(_LEAST_ROWS, num_rows // _LEAST_PART, num_rows // (num_holders + 1) + 1)
