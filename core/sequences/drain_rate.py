"""How fast the queue empties, for Retry-After and the queue's limit. Pure; the caller has the clock."""

from collections import deque
from math import ceil
from typing import NamedTuple

WINDOW_SECONDS = 10.0

_LEAST_SECONDS = 1.0
"""A shorter measurement only gives a lower bound of the rate, because rows end in bursts."""

_ROWFULS_AT_FIRST = 4
"""Sequences that may wait while the rate is unknown, as a multiple of the rows."""


class _Sample(NamedTuple):
    at: float  # seconds, monotonic
    num_seqs: int  # completed since the start
    num_tokens: int  # admitted since the start


class DrainRate:
    """Recent rates: sequences per second that made room for waiting ones, and prompt tokens per second that got a row.

    Only rows freed by completed sequences count. Rows that were never used, and rows of clients that left after waiting
    too long, would suggest a speed that does not exist. Times without a queue say nothing about how fast one empties:
    they are left out, and the last rates hold until there is a queue again.
    """

    __slots__ = ("_is_known", "_samples", "seqs_per_second", "tokens_per_second")

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()  # since the queue was last empty
        self._is_known = False
        self.seqs_per_second = 0.0  # 0: unknown, or nothing leaves
        self.tokens_per_second = 0.0

    def note(self, now: float, num_waiting: int, num_completed_seqs: int, num_admitted_tokens: int) -> None:
        """Record the current counters; call it several times a second while they change."""
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
        """Return how many sequences may wait for a row before one that must not wait longer than `seconds`.

        At least as many as there are rows: those wait for about as long as they will run. Before the rate is known, a
        few times as many, because the speed of a server that has just started is unknown.
        """
        if not self._is_known:
            return _ROWFULS_AT_FIRST * num_rows
        return max(num_rows, ceil(self.seqs_per_second * seconds))
