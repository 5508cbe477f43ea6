"""Draws a comparison's sweep: throughput and time between tokens over the number of requests at once, as SVG."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SWEEP = "concurrency "
_COLOURS = {"penstock": "#0b6e99", "vllm": "#d9822b", "openvino": "#7b4fa3", "llamacpp": "#4d8c3a"}


def is_available() -> bool:
    """Whether the chart library, an extra of its own (`penstock-llm[plan]`), is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def curve(record: Mapping[str, Any], system: str, figure: str) -> tuple[list[int], list[float]]:
    """(requests at once, median of the rounds) of one system, in order."""
    found: dict[int, list[float]] = {}
    for round_ in record["rounds"]:
        for workload, values in round_.get(system, {}).get("raw", {}).items():
            if workload.startswith(SWEEP):
                found.setdefault(int(workload.removeprefix(SWEEP)), []).append(values[figure])
    return sorted(found), [statistics.median(found[at]) for at in sorted(found)]


def draw(record: Mapping[str, Any], target: Path) -> None:
    """Write the SVG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "penstock"}):  # text as text; the same bytes each time
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        throughput, latency = figure.subplots(1, 2)
        for system in record["systems"]:
            at, rate = curve(record, system, "tokens_per_s")
            if not at:
                continue
            colour = _COLOURS.get(system, "black")
            label = system if record["systems"][system]["how"] == "HTTP" else f"{system} (in process)"
            throughput.plot(at, rate, "o-", color=colour, label=label)
            latency.plot(*curve(record, system, "itl_p50_ms"), "o-", color=colour, label=f"{label}, p50")
            latency.plot(*curve(record, system, "itl_p99_ms"), "^--", color=colour, label=f"{label}, p99")
        for axes, title in ((throughput, "output tokens per second"), (latency, "milliseconds between tokens")):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.set(xlabel="requests at once", title=title)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            if axes.has_data():
                axes.legend(fontsize="small")
        latency.set_ylim(auto=True)
        latency.set_yscale("log")
        figure.suptitle(
            f"{record['shape']}, {record['machine']['processor']}, {record['threads']} threads", fontsize=10
        )
        figure.savefig(target, format="svg", metadata={"Date": None})
