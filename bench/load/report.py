"""Turns outcomes into figures, and figures into a table."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.bench.load.job import Outcome


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of a sorted sequence lies, linear between neighbours; NaN if it is empty."""
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, p50, p99 and maximum in milliseconds of values in seconds."""
    ordered = sorted(values)
    mean = sum(ordered) / len(ordered) if ordered else math.nan
    figures = {"mean": mean, "p50": percentile(ordered, 0.5), "p99": percentile(ordered, 0.99)}
    figures["max"] = ordered[-1] if ordered else math.nan
    return {name: round(1e3 * value, 4) for name, value in figures.items()}


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """All figures of a run. Latencies are of the finished requests; the duration spans all of them.

    TPOT of a request is (e2e - ttft) / (tokens - 1). ITL are the gaps between arrivals: where a server
    sends several tokens in one piece, there are fewer gaps than tokens (`tokens_per_arrival` > 1).
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    failed = [outcome for outcome in outcomes if outcome.error]
    begin = min((outcome.start for outcome in outcomes), default=0.0)
    end = max((outcome.start + outcome.e2e for outcome in outcomes), default=begin)
    duration = max(end - begin, 1e-9)
    num_output = sum(outcome.num_output_tokens for outcome in good)
    num_prompt = sum(outcome.num_prompt_tokens for outcome in good)
    num_arrivals = sum(len(outcome.gaps) + 1 for outcome in good)
    reasons: dict[str, int] = {}
    for outcome in failed:
        reasons[outcome.error] = reasons.get(outcome.error, 0) + 1
    return {
        "num_requests": len(outcomes),
        "num_failed": len(failed),
        "errors": reasons,
        "duration_s": round(duration, 4),
        "requests_per_s": round(len(good) / duration, 4),
        "output_tokens_per_s": round(num_output / duration, 3),
        "total_tokens_per_s": round((num_output + num_prompt) / duration, 3),
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": sum(outcome.num_cached_tokens for outcome in good),
        "num_output_tokens": num_output,
        "tokens_per_arrival": round(num_output / num_arrivals, 4) if num_arrivals else 0.0,
        "is_counted_by_chunks": any(outcome.is_counted_by_chunks for outcome in good),
        "ttft_ms": spread([outcome.ttft for outcome in good]),
        "itl_ms": spread([gap for outcome in good for gap in outcome.gaps]),
        "tpot_ms": spread([(o.e2e - o.ttft) / (o.num_output_tokens - 1) for o in good if o.num_output_tokens > 1]),
        "e2e_ms": spread([outcome.e2e for outcome in good]),
    }


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """The figures for people."""
    latencies = Table(title="latency, ms")
    latencies.add_column("")
    for column in ("mean", "p50", "p99", "max"):
        latencies.add_column(column, justify="right")
    for row, name in (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("tpot_ms", "TPOT"), ("e2e_ms", "E2E")):
        latencies.add_row(name, *(f"{summary[row][column]:.2f}" for column in ("mean", "p50", "p99", "max")))
    console.print(latencies)
    console.print(
        f"{summary['num_requests']} requests, {summary['num_failed']} failed, in {summary['duration_s']:.2f} s: "
        f"{summary['requests_per_s']:.2f} requests/s, {summary['output_tokens_per_s']:.1f} output tokens/s, "
        f"{summary['total_tokens_per_s']:.1f} tokens/s in all"
    )
    console.print(
        f"{summary['num_prompt_tokens']} prompt tokens ({summary['num_cached_tokens']} cached), "
        f"{summary['num_output_tokens']} output tokens, {summary['tokens_per_arrival']:.2f} per arrival"
    )
    if summary["is_counted_by_chunks"]:
        console.print("[yellow]the server reports no usage: each chunk was counted as one token[/yellow]")
    for error, count in summary["errors"].items():
        console.print(f"[red]{count} x[/red] {escape(error)}", markup=True, highlight=False)
