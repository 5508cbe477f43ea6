"""Host time per step, exposed and hidden, from a step trace.

    penstock serve --step-trace steps.jsonl ... ; python -m bench.step steps.jsonl

A step's host time is what the scheduler spends on it: planning (`t_schedule_us`) and applying the
result (`t_process_us`). It is exposed as far as the device waited for the plan (`idle_us`, counted
only between steps that follow one another closely: an idle server is not waiting for its scheduler),
and hidden as far as the device was busy with the step before.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from penstock.bench.load.report import percentile


class StepLine(Struct, frozen=True):
    """The fields of a trace line that this needs; times in microseconds and monotonic seconds."""

    step_id: int
    t_schedule_us: float
    t_sent: float
    t_result: float
    num_rows: int
    num_tokens: int
    forward_us: float = 0.0
    idle_us: float = 0.0
    t_process_us: float = 0.0


def read_trace(path: Path) -> list[StepLine]:
    """The steps of a trace file, in its order.

    Raises:
        ValueError: naming the line that is no step.
    """
    decoder = msgspec.json.Decoder(StepLine)
    steps: list[StepLine] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            steps.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    return steps


def followers(steps: Sequence[StepLine], pause_us: float) -> list[StepLine]:
    """The steps for which work was waiting: their plan left less than `pause_us` after the result before came."""
    found: list[StepLine] = []
    for earlier, step in itertools.pairwise(steps):
        if (step.t_sent - earlier.t_result) * 1e6 < pause_us:
            found.append(step)
    return found


def figures(steps: Sequence[StepLine]) -> dict[str, list[float]]:
    """Per step, in microseconds: host time, the part that the device waited for, the hidden rest, and the step."""
    host = [step.t_schedule_us + step.t_process_us for step in steps]
    exposed = [step.idle_us for step in steps]
    hidden = [max(0.0, spent - waited) for spent, waited in zip(host, exposed, strict=True)]
    return {
        "schedule": [step.t_schedule_us for step in steps],
        "process": [step.t_process_us for step in steps],
        "host": host,
        "exposed": exposed,
        "hidden": hidden,
        "forward": [step.forward_us for step in steps],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--skip", type=int, default=10, help="steps at the start to leave out")
    parser.add_argument("--pause-us", type=float, default=2000.0, help="a longer pause means that no work was there")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    options = parser.parse_args(argv)
    try:
        steps = read_trace(options.trace)
    except (OSError, ValueError) as error:
        print(f"bench step: {error}", file=sys.stderr)
        return 2
    busy = followers(steps[options.skip :], options.pause_us)
    if not busy:
        print("bench step: no two steps follow one another closely", file=sys.stderr)
        return 2
    table = {
        name: {"mean": sum(values) / len(values), "p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}
        for name, values in ((name, sorted(values)) for name, values in figures(busy).items())
    }
    if options.json:
        print(msgspec.json.encode({"num_steps": len(busy), "us": table}).decode())
        return 0
    shown = Table(
        title=f"{len(busy)} steps, {sum(step.num_rows for step in busy) / len(busy):.1f} rows each; microseconds"
    )
    for column in ("", "mean", "p50", "p99"):
        shown.add_column(column, justify="right" if column else "left")
    for name, row in table.items():
        shown.add_row(name, *(f"{row[column]:.0f}" for column in ("mean", "p50", "p99")))
    Console().print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
