"""How fast the queue empties: what refused clients are told, and how many may wait. Pure; the caller has the clock."""

from collections import deque
from math import ceil
from typing import NamedTuple

WINDOW_SECONDS = 10.0

_LEAST_SECONDS = 1.0
"""A queue that has stood for less says only how fast it empties at least: rows end in bursts."""

_ROWFULS_AT_FIRST = 4
"""Times the rows that may wait while the rate is not known."""


class _Sample(NamedTuple):
    at: float  # seconds, monotonic
    num_seqs: int  # that have completed since the start
    num_tokens: int  # admitted since the start


class DrainRate:
    """Sequences a second that made room for waiting ones, and prompt tokens that got a row, over the last seconds.

    Rows count that are free because their sequences are complete. Rows that nobody had before, and those of clients
    that leave because they waited for too long, would tell of a speed that there is not. Times in which nobody waited
    say nothing about how fast a queue empties: they are left out, and the last rates that were seen hold until there
    is a queue again.
    """

    __slots__ = ("_is_known", "_samples", "seqs_per_second", "tokens_per_second")

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()  # since the queue was last empty
        self._is_known = False
        self.seqs_per_second = 0.0  # 0: not known, or nothing leaves
        self.tokens_per_second = 0.0

    def note(self, now: float, num_waiting: int, num_completed_seqs: int, num_admitted_tokens: int) -> None:
        """Take the present counters; call it several times a second while they change."""
        samples = self._samples
        if samples and now > samples[0].at:
            while len(samples) > 1 and now - samples[1].at >= WINDOW_SECONDS:
                samples.popleft()
            first, seconds = samples[0], now - samples[0].at
            is_complete = num_waiting > 0 and seconds >= _LEAST_SECONDS
            seconds = max(seconds, _LEAST_SECONDS)
            seqs_per_second = (num_completed_seqs - first.num_seqs) / seconds
            self._is_known |= is_complete and seqs_per_second > 0
            if is_complete or seqs_per_second > self.seqs_per_second:
                self.seqs_per_second = seqs_per_second
                self.tokens_per_second = (num_admitted_tokens - first.num_tokens) / seconds
        if num_waiting:
            samples.append(_Sample(now, num_completed_seqs, num_admitted_tokens))
        else:
            samples.clear()

    def turns_within(self, seconds: float, num_rows: int) -> int:
        """How many sequences may wait for a row before one that shall wait no longer than `seconds`.

        As many as there are rows in any case: they wait for about as long as they will run. Until a queue has been seen
        to move, some more: nobody knows yet how fast a server is that has just begun.
        """
        if not self._is_known:
            return _ROWFULS_AT_FIRST * num_rows
        return max(num_rows, ceil(self.seqs_per_second * seconds))
