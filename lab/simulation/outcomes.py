"""The outcomes of a run's requests, and the scheduler's pages and rows over time."""

from collections.abc import Mapping
from typing import NamedTuple

from penstock.core.scheduling.scheduler import Scheduler
from penstock.core.scheduling.stats import Totals

_MOST_SAMPLES = 512


class Outcome:
    """One request, as its client saw it. Times are seconds of the run."""

    __slots__ = ("ended", "error", "first_token", "num_cached", "num_ends", "num_tokens", "sent")

    def __init__(self, sent: float) -> None:
        self.sent = sent
        self.first_token: float | None = None
        self.ended = 0.0
        self.num_ends = 0  # 1 after the run
        self.num_tokens = 0  # of its answer
        self.num_cached = 0  # tokens of its prompt that were not computed
        self.error = ""  # why it was refused, or ended before its length

    def end(self, at: float, num_tokens: int, error: str) -> None:
        """The client has got the last token, or the error."""
        self.ended, self.num_tokens, self.error = at, num_tokens, error
        self.num_ends += 1

    @property
    def ttft(self) -> float:
        """Seconds until the first token; only for an answer that has one."""
        assert self.first_token is not None
        return self.first_token - self.sent

    @property
    def e2e(self) -> float:
        """Seconds until the last token."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float:
        """Mean seconds between tokens; 0 if there is only one."""
        assert self.first_token is not None
        return (self.ended - self.first_token) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


class Sample(NamedTuple):
    """The scheduler at one moment."""

    at: float
    num_used: int  # pages in running sequences' tables
    num_cached: int  # pages of the prefix cache alone
    num_running: int
    num_waiting: int


class Gauge:
    """Samples a scheduler's state at intervals that give some hundred samples, however long the run is."""

    def __init__(self, scheduler: Scheduler, weights: Mapping[str, float]) -> None:
        """`weights`: the weight of each key."""
        self._scheduler = scheduler
        self._weights = weights
        self._interval = 1e-3
        self._next_at = 0.0
        self._looked_at = 0.0
        self.samples: list[Sample] = []
        self._held: dict[str, float] = {}  # rows x seconds of each key while it had something waiting
        self._fair: dict[str, float] = {}  # its share, by weight, of all rows x seconds in that time

    def note(self, now: float) -> None:
        """Take a sample if one is due; call this after each event."""
        if len(self._weights) > 1 and self._scheduler.waiting.num_seqs:
            self._share_out(now - self._looked_at)
        self._looked_at = now
        if now >= self._next_at:
            scheduler = self._scheduler
            pool = scheduler.kv.pool
            self.samples.append(
                Sample(now, pool.num_used, pool.num_cached, len(scheduler.running), scheduler.waiting.num_seqs)
            )
            if len(self.samples) == _MOST_SAMPLES:
                del self.samples[1::2]
                self._interval *= 2
            self._next_at = now + self._interval

    def shares(self) -> dict[str, float]:
        """Return, for each key that ever had to wait, the part of its fair share of rows that it got, at most 1."""
        return {key: min(1.0, self._held[key] / fair) for key, fair in self._fair.items() if fair > 0}

    def _share_out(self, seconds: float) -> None:
        rows_of = self._scheduler.running.rows_of
        weights, waiting = self._weights, {each.tenant for each in self._scheduler.waiting.tenants()}
        per_weight = len(self._scheduler.running) * seconds / sum(weights[key] for key in waiting | rows_of.keys())
        for key in waiting:
            held = sum(rows_of[key].values()) if key in rows_of else 0
            self._held[key] = self._held.get(key, 0.0) + held * seconds
            self._fair[key] = self._fair.get(key, 0.0) + weights[key] * per_weight


class Run(NamedTuple):
    """The results of a finished simulation."""

    outcomes: list[Outcome]
    totals: Totals
    samples: list[Sample]
    shares: Mapping[str, float]  # `Gauge.shares`
    busy: float  # seconds that the device computed
