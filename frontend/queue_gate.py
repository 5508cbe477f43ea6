"""The queue as a frontend sees it: whom to refuse before anything costly is done for him, and when to try again.

The scheduler has the last word (`core/intake.py`). What it says of its queue is up to a fraction of a second old, so
between two of its reports the gate adds what this frontend has let in since, and what is still being tokenized.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil

from penstock.core.config.options import SchedulerOptions
from penstock.frontend.errors import Overloaded
from penstock.ipc.messages import EngineReady, EngineStats

UNKNOWN_RETRY_SECONDS, MAX_RETRY_SECONDS = 5, 120


def retry_after(stats: EngineStats | None, num_seqs: int, num_tokens: int = 0) -> int:
    """Whole seconds until so many sequences and tokens have left the queue at its present rate; at least 1."""
    if stats is None:
        return 1
    rates = ((num_seqs, stats.drained_seqs_per_second), (num_tokens, stats.drained_tokens_per_second))
    seconds = max(num / rate if rate > 0 else UNKNOWN_RETRY_SECONDS for num, rate in rates if num > 0)
    return min(max(ceil(seconds), 1), MAX_RETRY_SECONDS)


class QueueGate:
    """Counts by sequences and by prompt tokens; the prompt of a request with `n` sequences counts `n` times."""

    def __init__(self, options: SchedulerOptions, stats: Callable[[], EngineStats | None]) -> None:
        """`options` hold until the engine tells its own; `stats` gives its latest word, None before the first."""
        self._max_seqs = options.max_num_queued_seqs
        self._max_tokens = options.max_num_queued_tokens
        self._stats = stats
        self._told: EngineStats | None = None
        self._num_seqs_since = 0  # that came, less those that ended, since the latest word
        self._num_tokens_since = 0  # that came since
        self._num_reserved_seqs = 0  # let in, but not submitted yet
        self._num_reserved_tokens = 0

    def set_limits(self, facts: EngineReady) -> None:
        """What the scheduler was started with counts; a frontend started by itself has no such options."""
        self._max_seqs = facts.max_num_queued_seqs or self._max_seqs
        self._max_tokens = facts.max_num_queued_tokens or self._max_tokens

    def check(self, num_seqs: int = 1, num_tokens: int = 0) -> None:
        """Refuse what would not fit. Whoever finds the queue empty is let in however many tokens he brings.

        Raises:
            Overloaded: with the seconds after which there should be room.
        """
        stats = self._latest()
        num_waiting, num_tokens_waiting = self._num_reserved_seqs, self._num_reserved_tokens
        if stats is not None:
            num_waiting += stats.num_waiting + self._num_seqs_since
            num_tokens_waiting += stats.num_waiting_tokens + self._num_tokens_since
            if not stats.num_waiting:  # newcomers went straight to the rows that were free
                num_waiting -= stats.num_rows - stats.num_running
                num_tokens_waiting = num_tokens_waiting if num_waiting > 0 else 0
        excess = num_waiting + num_seqs - self._max_seqs
        if excess > 0:
            raise Overloaded(
                f"the queue is full: {num_waiting} sequences wait, the limit is {self._max_seqs}",
                retry_after=retry_after(stats, excess),
            )
        excess_tokens = num_tokens_waiting + num_tokens - self._max_tokens
        if num_tokens_waiting > 0 and excess_tokens > 0:
            raise Overloaded(
                f"the queue is full: its prompts have {num_tokens_waiting} tokens, the limit is {self._max_tokens}",
                retry_after=retry_after(stats, 0, excess_tokens),
            )

    @contextmanager
    def place(self, num_seqs: int, num_tokens: int) -> Iterator[None]:
        """Keep room while a request is tokenized; `num_tokens` is a bound, made from the bytes that it came in.

        Raises:
            Overloaded: if there is none.
        """
        self.check(num_seqs, num_tokens)
        self._num_reserved_seqs += num_seqs
        self._num_reserved_tokens += num_tokens
        try:
            yield
        finally:
            self._num_reserved_seqs -= num_seqs
            self._num_reserved_tokens -= num_tokens

    def submitted(self, num_seqs: int, num_tokens: int) -> None:
        """A request goes to the engine, with the tokens that it really has."""
        self._latest()
        self._num_seqs_since += num_seqs
        self._num_tokens_since += num_tokens

    def ended(self, num_seqs: int) -> None:
        """A submitted request has ended: somebody who waited, itself perhaps, waits no more."""
        self._latest()
        self._num_seqs_since -= num_seqs

    def _latest(self) -> EngineStats | None:
        stats = self._stats()
        if stats is not self._told:
            self._told = stats
            self._num_seqs_since = self._num_tokens_since = 0
        return stats
