"""Preemption in favour of waiting sequences: running ones give up their rows and pages.

What gives way to all others yields first (`Request.gives_way`). Other sequences yield for two reasons:

By level: under a policy that preempts, its victim yields if it is on a higher level.

By share: rows of long sequences rarely become free, and one tenant could keep all others from a first token with them.
So a tenant without a row takes one from the tenant with the most rows, and a group without a row takes one from the
largest group of its tenant, if the loser has many rows, and more than its share. The sequence that has had its row for
the longest time yields. It goes to the end of the line, so that all sequences make progress.

For the pages of running sequences, `launches.py` decides who loses its own; it preempts here, too (`Yielding.preempt`).
"""

from collections.abc import Callable
from operator import attrgetter

from penstock.core.scheduling.admissions import Admissions
from penstock.core.scheduling.part import Parts
from penstock.core.scheduling.policy import Policy
from penstock.core.scheduling.running_set import RunningSet
from penstock.core.scheduling.stats import Totals
from penstock.core.scheduling.step_record import Preemption
from penstock.core.sequences.sequence import Sequence
from penstock.core.sequences.waiting_queue import WaitingQueue

_LEAST_ROWS = 2
_LEAST_PART = 8
"""A tenant with less than an eighth of all rows loses none by share."""

_order = attrgetter("order")


_NOBODY: tuple[Sequence | None, int, int, int] = (None, 0, 0, 0)


class Yielding:
    """Preempts sequences of one worker in favour of others."""

    __slots__ = (
        "_admissions", "_nobody_yields_to", "_policy", "_running", "_swaps_out", "_totals", "_vacate", "_waiting",
        "preempted",
    )  # fmt: skip

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningSet,
        parts: Parts,
        admissions: Admissions,
        totals: Totals,
        vacate: Callable[[Sequence, bool], None],
    ) -> None:
        """`vacate` takes a sequence out of its row and puts it back into the queue, at its end if the flag is set."""
        self._waiting = waiting
        self._running = running
        self._policy = parts.policy
        self._swaps_out = parts.swaps_out
        self._admissions = admissions
        self._totals = totals
        self._vacate = vacate
        self.preempted: list[Preemption] = []  # since the last plan
        self._nobody_yields_to = _NOBODY  # holds until sequences come or go

    def make_way(self) -> None:
        """Take rows, and pages, from sequences that yield to the head of the queue."""
        running, head, policy = self._running, self._waiting.head(), self._policy
        state = (head, running.num_entered, running.num_left, self._waiting.num_changes)
        if head is None or state == self._nobody_yields_to or running.draining:
            return  # a draining sequence leaves its row in a moment
        if self._comes_first(head) and self._admissions.lacks_room(head):
            if not self._admissions.has_all_made(head):
                return
            while running.giving_way and self._admissions.lacks_room(head):
                first = running.victim(policy)
                self.preempt(first, f"{head.request_id}/{head.sequence_idx} comes before {first.request.gives_way}")
                self._admissions.favour(head)
            return
        if policy.preempts and not head.request.is_overdue:
            while (victim := by_level(head, running, policy)) is not None and self._admissions.lacks_room(head):
                if not self._admissions.has_all_made(head):
                    return  # its grammar or an image is not ready: it is held until its next turn
                self.preempt(victim, f"{head.request_id}/{head.sequence_idx} has a higher priority")
                self._admissions.favour(head)
            if victim is not None:
                return
        if not running.num_free_rows and not self._admissions.awaits_departure:
            newcomer = self._waiting.without_row(running.rows_of)
            if newcomer is not None and self._admissions.lacks_room(newcomer):
                victim = by_share(newcomer, running)
                if victim is not None:
                    if not self._admissions.has_all_made(newcomer):
                        return
                    self._waiting.bring_forward(newcomer)
                    self.preempt(victim, f"{newcomer.request_id}/{newcomer.sequence_idx} had no row", at_end=True)
                    return
        self._nobody_yields_to = state

    def _comes_first(self, head: Sequence) -> bool:
        """Whether some running sequence gives way to the head of the queue: not if it is to end first."""
        if not self._running.giving_way or head.request.gives_way:
            return False
        return self._running.victim(self._policy).request.level > head.request.level

    def preempt(self, seq: Sequence, reason: str, *, at_end: bool = False) -> None:
        """Take back a running sequence's row and pages, and put it back into the queue.

        Its tokens are kept. Its settled full pages stay in the prefix cache, or are copied to the host before they can
        be overwritten. Results in flight for it are dropped.
        """
        self._totals.num_preemptions += 1
        assert seq.account is not None
        seq.account.num_preemptions += 1
        if not at_end:
            self._admissions.await_departure()
        is_swapped = any(swaps_out(seq) for swaps_out in self._swaps_out)
        self.preempted.append(Preemption(seq.request_id, seq.sequence_idx, reason, is_swapped))
        self._vacate(seq, at_end)


def by_level(head: Sequence, running: RunningSet, policy: Policy) -> Sequence | None:
    """Return the sequence that yields to a waiting one on a lower level, or None. No sequence may be draining."""
    found = running.victim(policy) if len(running) and policy.takes_rows(head) else None
    return found if found is not None and policy.yields(found, head) else None


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
    # Levels come first: a sequence on a lower level than the new one keeps its row.
    candidates = [seq for seq in candidates if seq.request.level >= request.level]
    return min(candidates, key=_order, default=None)


def _many(num_rows: int, num_holders: int) -> int:
    """The least number of rows that exceeds a fair share, counting one more holder."""
    return max(_LEAST_ROWS, num_rows // _LEAST_PART, num_rows // (num_holders + 1) + 1)
