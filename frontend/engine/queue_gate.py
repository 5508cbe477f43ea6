"""The queue as a frontend sees it: whom to refuse before anything costly is done for it, and when to try again.

The scheduler has the last word (`core/sequences/intake.py`). What it says of its queue is up to a fraction of a second
old, so between two of its reports the gate adds what this frontend has let in since, and what is still being tokenized.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil

from penstock.core.config.options import SchedulerOptions
from penstock.frontend.errors import Overloaded
from penstock.ipc.messages import EngineReady, EngineStats, WaitingTenant
from penstock.ipc.queue_turns import turns_before

UNKNOWN_RETRY_SECONDS, MAX_RETRY_SECONDS = 5, 120


def retry_after(stats: EngineStats | None, num_seqs: int, num_tokens: int = 0) -> int:
    """Whole seconds until so many sequences and tokens have left the queue at its present rate; at least 1."""
    if stats is None:
        return 1
    rates = ((num_seqs, stats.drained_seqs_per_second), (num_tokens, stats.drained_tokens_per_second))
    seconds = max(num / rate if rate > 0 else UNKNOWN_RETRY_SECONDS for num, rate in rates if num > 0)
    return min(max(ceil(seconds), 1), MAX_RETRY_SECONDS)


class _Load:
    """Requests that the scheduler has not told of yet."""

    def __init__(self) -> None:
        self.groups: Counter[str] = Counter()  # by tenant
        self.seqs: Counter[str] = Counter()
        self.num_seqs = 0
        self.num_tokens = 0

    def add(self, tenant: str, num_seqs: int, num_tokens: int) -> None:
        self.groups[tenant] += 1
        self.seqs[tenant] += num_seqs
        self.num_seqs += num_seqs
        self.num_tokens += num_tokens

    def take(self, tenant: str, num_seqs: int, num_tokens: int) -> None:
        self.groups[tenant] -= 1
        self.seqs[tenant] -= num_seqs
        if not self.groups[tenant]:
            del self.groups[tenant], self.seqs[tenant]
        self.num_seqs -= num_seqs
        self.num_tokens -= num_tokens


class QueueGate:
    """Counts by sequences, by prompt tokens (a prompt with `n` sequences counts `n` times), and by turns."""

    def __init__(self, options: SchedulerOptions, stats: Callable[[], EngineStats | None]) -> None:
        """`options` hold until the engine tells its own; `stats` gives its latest word, None before the first."""
        self._max_seqs = options.max_num_queued_seqs
        self._max_tokens = options.max_num_queued_tokens
        self._stats = stats
        self._told: EngineStats | None = None
        self._since = _Load()  # what came since the latest word
        self._num_ended_since = 0  # sequences
        self._reserved = _Load()  # let in, but not submitted yet

    def set_limits(self, facts: EngineReady) -> None:
        """What the scheduler was started with counts; a frontend started by itself has no such options."""
        self._max_seqs = facts.max_num_queued_seqs or self._max_seqs
        self._max_tokens = facts.max_num_queued_tokens or self._max_tokens

    def check(self, num_seqs: int = 1, num_tokens: int = 0, tenant: str | None = None) -> None:
        """Refuse what would not fit, or would wait too long for its turn. Without a tenant: that of whoever waits most.

        A request that finds the queue empty is let in, however many tokens it has.

        Raises:
            Overloaded: with the seconds after which there should be room.
        """
        stats = self._latest()
        num_waiting, num_tokens_waiting = self._reserved.num_seqs, self._reserved.num_tokens
        num_free_rows = 0
        if stats is not None:
            num_waiting += stats.num_waiting + self._since.num_seqs - self._num_ended_since
            num_tokens_waiting += stats.num_waiting_tokens + self._since.num_tokens
            if not stats.num_waiting:  # newcomers went straight to the rows that were free
                num_free_rows = stats.num_rows - stats.num_running
                num_waiting -= num_free_rows
                num_tokens_waiting = num_tokens_waiting if num_waiting > 0 else 0
        counts = self._counts(stats)
        if tenant is None:
            tenant = max(counts, key=lambda each: each.num_groups).tenant if counts else ""
        is_beside_others = bool(counts) and all(each.tenant != tenant for each in counts)
        max_seqs = self._max_seqs * (2 if is_beside_others else 1)  # as in core/sequences/intake.py
        excess = num_waiting + num_seqs - max_seqs
        if excess > 0:
            raise Overloaded(
                f"the queue is full: {num_waiting} sequences wait, the limit is {max_seqs}",
                retry_after=retry_after(stats, excess),
            )
        excess_tokens = num_tokens_waiting + num_tokens - self._max_tokens
        if num_tokens_waiting > 0 and excess_tokens > 0:
            raise Overloaded(
                f"the queue is full: its prompts have {num_tokens_waiting} tokens, the limit is {self._max_tokens}",
                retry_after=retry_after(stats, 0, excess_tokens),
            )
        if stats is not None and stats.max_turns and num_waiting > 0:
            num_turns = turns_before(tenant, counts) - num_free_rows - self._num_ended_since
            if num_turns >= stats.max_turns:
                raise Overloaded(
                    f"the queue is too long: {num_turns} others would have their turn before, at most "
                    f"{stats.max_turns} may",
                    retry_after=retry_after(stats, num_turns + 1 - stats.max_turns),
                )

    @contextmanager
    def reserve(self, num_seqs: int, num_tokens: int, tenant: str) -> Iterator[None]:
        """Keep room while a request is tokenized; `num_tokens` is a bound, made from the bytes that it came in.

        Raises:
            Overloaded: if there is none.
        """
        self.check(num_seqs, num_tokens, tenant)
        self._reserved.add(tenant, num_seqs, num_tokens)
        try:
            yield
        finally:
            self._reserved.take(tenant, num_seqs, num_tokens)

    def submitted(self, num_seqs: int, num_tokens: int, tenant: str) -> None:
        """A request goes to the engine, with the tokens that it really has."""
        self._latest()
        self._since.add(tenant, num_seqs, num_tokens)

    def ended(self, num_seqs: int) -> None:
        """A submitted request has ended: somebody who waited, itself perhaps, waits no more."""
        self._latest()
        self._num_ended_since += num_seqs

    def _counts(self, stats: EngineStats | None) -> list[WaitingTenant]:
        """What waits of each tenant, as far as is known here."""
        groups, seqs = self._since.groups + self._reserved.groups, self._since.seqs + self._reserved.seqs
        for each in () if stats is None else stats.waiting_tenants:
            groups[each.tenant] += each.num_groups
            seqs[each.tenant] += each.num_seqs
        return [WaitingTenant(name, seqs[name], groups[name]) for name in groups]

    def _latest(self) -> EngineStats | None:
        stats = self._stats()
        if stats is not self._told:
            self._told = stats
            self._since = _Load()
            self._num_ended_since = 0
        return stats
