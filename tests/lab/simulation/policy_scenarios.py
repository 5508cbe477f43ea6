"""For each scheduling policy the load that it is made for, and what is claimed of it there, beside fcfs."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.bench.load.report import percentile
from penstock.lab.simulation.arrivals import Arrival

LIGHT, FLOOD = "light", "flood"
"""API keys."""
NUM_PAGES = 8 * 2048 // 16
"""Of the pool: eight rows at their longest."""
_PREFIX, _NUM_PREFIXES = 768, 12
_TTFT_MS = 500.0
_AT_ONCE = 60


class Served(NamedTuple):
    """What became of a request; times in seconds since it was sent."""

    arrival: Arrival
    ttft: float
    e2e: float
    num_cached: int
    error: str


class Run(NamedTuple):
    """One configuration of a scenario."""

    policy: str
    arrivals: list[Arrival]


class Scenario(NamedTuple):
    """A policy's claim."""

    policy: str
    claim: str
    figure: Callable[[Sequence[Served]], float]  # of a run
    is_less_better: bool
    make: Callable[[random.Random, Callable[[Sequence[Arrival]], float], float], list[Run]]
    """(random numbers, requests a second that fcfs serves of a load, seconds) -> the runs; the policy's comes last."""
    target: float  # of the ratio
    baseline: str = "fcfs"
    num_pages: int = NUM_PAGES

    def ratio(self, baseline: float, policy: float) -> float:
        """By how much the policy is better."""
        better, worse = (policy, baseline) if self.is_less_better else (baseline, policy)
        return worse / better if better else 0.0


def _spread(rng: random.Random, rate: float, seconds: float, make: Callable[[float], Arrival]) -> list[Arrival]:
    """Poisson arrivals for so long."""
    found, at = list[Arrival](), rng.expovariate(rate)
    while at < seconds:
        found.append(make(at))
        at += rng.expovariate(rate)
    return found


def _overload(
    make: Callable[[random.Random, float], Arrival], factor: float, policies: Sequence[str]
) -> Callable[[random.Random, Callable[[Sequence[Arrival]], float], float], list[Run]]:
    """Arrivals at so many times what fcfs serves of them, the same for each policy."""

    def runs(rng: random.Random, served: Callable[[Sequence[Arrival]], float], seconds: float) -> list[Run]:
        capacity = served([make(rng, 0.0) for _ in range(_AT_ONCE)])
        arrivals = _spread(rng, factor * capacity, seconds, lambda at: make(rng, at))
        return [Run(policy, arrivals) for policy in policies]

    return runs


def _jobs(rng: random.Random, at: float) -> Arrival:
    """Four of five are short, one is long."""
    if rng.random() < 0.8:
        return Arrival(time=at, input_len=rng.randint(64, 192), output_len=rng.randint(4, 8))
    return Arrival(time=at, input_len=rng.randint(1200, 1600), output_len=rng.randint(24, 48))


def _of_a_prefix(rng: random.Random, at: float) -> Arrival:
    prefix = f"prefix-{rng.randrange(_NUM_PREFIXES)}"
    return Arrival(time=at, input_len=_PREFIX + rng.randint(16, 48), output_len=4, prefix_id=prefix, prefix_len=_PREFIX)


def _urgent_or_not(rng: random.Random, at: float) -> Arrival:
    priority = -1 if rng.random() < 0.15 else 0
    return Arrival(time=at, input_len=rng.randint(300, 700), output_len=8, priority=priority)


def _due(rng: random.Random, at: float) -> Arrival:
    return Arrival(time=at, input_len=rng.randint(300, 700), output_len=8, ttft_ms=_TTFT_MS)


def _light_and_flood(rng: random.Random, served: Callable[[Sequence[Arrival]], float], seconds: float) -> list[Run]:
    """A user with a long prompt now and then; beside it, or not, one who sends twice what the server can do."""

    def flood(at: float) -> Arrival:
        return Arrival(time=at, input_len=rng.randint(48, 96), output_len=64, key=FLOOD)

    light = [
        Arrival(time=at + rng.random() * 0.1, input_len=1536, output_len=4, key=LIGHT)
        for at in (0.5 + 0.5 * i for i in range(int(2 * seconds) - 2))
    ]
    capacity = served([flood(0.0) for _ in range(_AT_ONCE)])
    both = sorted(light + _spread(rng, 2 * capacity, seconds, flood), key=lambda each: each.time)
    return [Run("alone", light), Run("fcfs", both), Run("fair", both)]


def _hit_rate(served: Sequence[Served]) -> float:
    good = [each for each in served if not each.error]
    return sum(each.num_cached for each in good) / max(1, sum(each.arrival.input_len for each in good))


def _mean_latency(served: Sequence[Served]) -> float:
    good = [each.e2e for each in served if not each.error]
    return sum(good) / max(1, len(good))


def _slowest_long(served: Sequence[Served]) -> float:
    return percentile(sorted(each.e2e for each in served if not each.error and each.arrival.input_len >= 1200), 0.99)


def _ttft_p99(chosen: Callable[[Arrival], bool]) -> Callable[[Sequence[Served]], float]:
    def figure(served: Sequence[Served]) -> float:
        return percentile(sorted(each.ttft for each in served if not each.error and chosen(each.arrival)), 0.99)

    return figure


def _goodput(served: Sequence[Served]) -> float:
    return sum(not each.error and 1e3 * each.ttft <= _TTFT_MS for each in served) / max(1, len(served))


SCENARIOS = (
    Scenario(
        "cache-aware",
        f"hit rate on prompts with {_NUM_PREFIXES} prefixes of which the pool holds four",
        _hit_rate,
        False,
        _overload(_of_a_prefix, 1.5, ("fcfs", "cache-aware")),
        1.2,
        num_pages=4 * _PREFIX // 16 + 64,
    ),
    Scenario("sjf", "mean latency of short and long jobs", _mean_latency, True,
             _overload(_jobs, 1.5, ("fcfs", "sjf")), 1.2),
    Scenario("hrrn", "mean latency of short and long jobs", _mean_latency, True,
             _overload(_jobs, 1.5, ("fcfs", "hrrn")), 1.1),
    Scenario("hrrn", "p99 latency of the long jobs beside sjf", _slowest_long, True,
             _overload(_jobs, 1.5, ("sjf", "hrrn")), 1.0, baseline="sjf"),
    Scenario("priority", "p99 TTFT of urgent requests", _ttft_p99(lambda each: each.priority < 0), True,
             _overload(_urgent_or_not, 1.5, ("fcfs", "priority")), 2.0),
    Scenario("fair", "p99 TTFT of a light user alone, over that beside one who floods",
             _ttft_p99(lambda each: each.key == LIGHT), True, _light_and_flood, 1 / 1.5, baseline="alone"),
    Scenario("deadline", f"answers begun within {_TTFT_MS:.0f} ms under twice the load", _goodput, False,
             _overload(_due, 2.0, ("fcfs", "deadline")), 1.3),
)  # fmt: skip
