"""How fast the queue empties, for what refused clients are told to wait. Pure; the caller has the clock."""

from collections import deque
from typing import NamedTuple

WINDOW_SECONDS = 10.0


class _Sample(NamedTuple):
    at: float  # seconds, monotonic
    num_seqs: int  # admitted from the queue since the start
    num_tokens: int  # their prompt tokens


class DrainRate:
    """Sequences and prompt tokens a second that left the queue for a row, over the last seconds in which one was there.

    Times in which nobody waited say nothing about how fast a queue empties: they are left out, and the last rates
    that were seen hold until there is a queue again.
    """

    __slots__ = ("_samples", "seqs_per_second", "tokens_per_second")

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self.seqs_per_second = 0.0  # 0: not known, or nothing leaves
        self.tokens_per_second = 0.0

    def note(self, now: float, num_waiting: int, num_admitted_seqs: int, num_admitted_tokens: int) -> None:
        """Take the present counters; call it several times a second while they change."""
        samples = self._samples
        samples.append(_Sample(now, num_admitted_seqs, num_admitted_tokens))
        while len(samples) > 2 and now - samples[1].at >= WINDOW_SECONDS:
            samples.popleft()
        first, seconds = samples[0], now - samples[0].at
        if seconds > 0 and (num_waiting or num_admitted_seqs > first.num_seqs):
            self.seqs_per_second = (num_admitted_seqs - first.num_seqs) / seconds
            self.tokens_per_second = (num_admitted_tokens - first.num_tokens) / seconds
        if not num_waiting:
            samples.clear()
            samples.append(_Sample(now, num_admitted_seqs, num_admitted_tokens))
