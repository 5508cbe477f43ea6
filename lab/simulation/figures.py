"""The figures of a run."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from penstock.lab.simulation.arrivals import Arrival, Targets
from penstock.lab.simulation.outcomes import Outcome, Run


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of a sorted sequence lies, linear between neighbours; 0 if it is empty."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(seconds: Collection[float]) -> dict[str, float]:
    """Mean, p50 and p99 in milliseconds."""
    ordered = sorted(seconds)
    mean = math.fsum(ordered) / len(ordered) if ordered else 0.0
    found = {"mean": mean, "p50": percentile(ordered, 0.5), "p99": percentile(ordered, 0.99)}
    return {name: round(1e3 * value, 4) for name, value in found.items()}


def jain(shares: Collection[float]) -> float:
    """Jain's index (1984): 1 if all are equal, 1/n if one has everything; 1 if there is nothing to share."""
    squares = math.fsum(share * share for share in shares)
    return math.fsum(shares) ** 2 / len(shares) / squares if squares else 1.0


def figures(run: Run, arrivals: Sequence[Arrival], num_pages: int, targets: Targets) -> dict[str, Any]:
    """The figures for a table, a plot or a program. Latencies cover only answers that were completed."""
    good = [(o, a) for o, a in zip(run.outcomes, arrivals, strict=True) if not o.error]
    answered = [outcome for outcome, _ in good]
    began = min((outcome.sent for outcome in run.outcomes), default=0.0)
    ended = max((outcome.ended for outcome in answered), default=began)
    seconds = max(ended - began, 1e-9)
    num_output = sum(outcome.num_tokens for outcome in answered)
    in_time = sum(_keeps(outcome, targets.of(arrival)) for outcome, arrival in good)
    by_key: dict[str, list[float]] = {}
    for outcome, arrival in good:
        by_key.setdefault(arrival.key, []).append(outcome.ttft)
    totals, used = run.totals, [sample.num_used for sample in run.samples]
    return {
        "num_requests": len(run.outcomes),
        "num_failed": len(run.outcomes) - len(answered),
        "errors": dict(Counter(outcome.error for outcome in run.outcomes if outcome.error)),
        "duration_s": round(seconds, 6),
        "requests_per_s": round(len(answered) / seconds, 4),
        "output_tokens_per_s": round(num_output / seconds, 3),
        "goodput_per_s": round(in_time / seconds, 4),
        "goodput": round(in_time / max(1, len(run.outcomes)), 4),
        "ttft_ms": spread([outcome.ttft for outcome in answered]),
        "tpot_ms": spread([outcome.tpot for outcome in answered if outcome.num_tokens > 1]),
        "e2e_ms": spread([outcome.e2e for outcome in answered]),
        "fairness": round(jain(run.shares.values()), 4),
        "num_steps": totals.num_steps,
        "num_preemptions": totals.num_preemptions,
        "num_prompt_tokens": totals.num_prompt_tokens,
        "num_cached_tokens": totals.num_cached_tokens,
        "num_output_tokens": num_output,
        "hit_rate": round(totals.num_cached_tokens / max(1, totals.num_prompt_tokens), 4),
        "busy": round(run.busy / seconds, 4),
        "num_pages": num_pages,
        "pages_used": {"mean": round(math.fsum(used) / max(1, len(used)), 1), "max": max(used, default=0)},
        "ttft_ms_by_key": {key: spread(times) for key, times in sorted(by_key.items()) if len(by_key) > 1},
    }


_NUM_QUANTILES, _MOST_SAMPLES = 50, 256


def curves(run: Run) -> dict[str, Any]:
    """The data of plots: milliseconds at equal steps of the share of answers, and the scheduler over time.

    `timeline`: seconds, pages in tables, pages of the prefix cache alone, running, waiting.
    """
    answered = [outcome for outcome in run.outcomes if not outcome.error]
    times = {
        "ttft_ms": sorted(outcome.ttft for outcome in answered),
        "tpot_ms": sorted(outcome.tpot for outcome in answered if outcome.num_tokens > 1),
        "e2e_ms": sorted(outcome.e2e for outcome in answered),
    }
    shares = [place / _NUM_QUANTILES for place in range(_NUM_QUANTILES + 1)]
    quantiles = {name: [round(1e3 * percentile(found, share), 4) for share in shares] for name, found in times.items()}
    thinned = run.samples[:: max(1, -(-len(run.samples) // _MOST_SAMPLES))]
    timeline = [
        [round(each.at, 4), each.num_used, each.num_cached, each.num_running, each.num_waiting] for each in thinned
    ]
    return {"quantiles": quantiles, "timeline": timeline}


def _keeps(outcome: Outcome, targets: Targets) -> bool:
    ttft, tpot = targets
    return (not ttft or 1e3 * outcome.ttft <= ttft) and (not tpot or 1e3 * outcome.tpot <= tpot)
