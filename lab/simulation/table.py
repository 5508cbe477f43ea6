"""A comparison as a table for people."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from penstock.lab.simulation.study import Result

_ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("TTFT p50, ms", ("ttft_ms", "p50"), "{:,.1f}"),
    ("TTFT p99, ms", ("ttft_ms", "p99"), "{:,.1f}"),
    ("TPOT p50, ms", ("tpot_ms", "p50"), "{:,.2f}"),
    ("TPOT p99, ms", ("tpot_ms", "p99"), "{:,.2f}"),
    ("E2E p50, ms", ("e2e_ms", "p50"), "{:,.1f}"),
    ("E2E p99, ms", ("e2e_ms", "p99"), "{:,.1f}"),
    ("requests/s", ("requests_per_s",), "{:,.2f}"),
    ("output tokens/s", ("output_tokens_per_s",), "{:,.1f}"),
    ("goodput, requests/s", ("goodput_per_s",), "{:,.2f}"),
    ("goodput, share", ("goodput",), "{:.1%}"),
    ("fairness (Jain)", ("fairness",), "{:.3f}"),
    ("refused or failed", ("num_failed",), "{:,}"),
    ("preemptions", ("num_preemptions",), "{:,}"),
    ("prefix hits", ("hit_rate",), "{:.1%}"),
    ("pages used, mean", ("pages_used", "mean"), "{:,.0f}"),
    ("pages used, most", ("pages_used", "max"), "{:,}"),
    ("device busy", ("busy",), "{:.1%}"),
)


def table(results: Sequence[Result]) -> Table:
    """Make a table with a column for each configuration."""
    made = Table(box=None)
    made.add_column("", no_wrap=True)
    for result in results:
        made.add_column(result.name, justify="right", no_wrap=True)
    for title, path, form in _ROWS:
        made.add_row(title, *(form.format(_at(result.figures, path)) for result in results))
    return made


def _at(found: dict[str, Any], path: Sequence[str]) -> Any:
    value: Any = found
    for name in path:
        value = value[name]
    return value
