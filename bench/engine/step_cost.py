"""What a decode step costs as rows, context and the number of finished requests grow: linear, linear and flat.

    python -m bench.engine.step_cost [--shape llama-tiny] [--threads N] [--out FOLDER]

Through the scheduler (prefix cache on, so that finished requests leave something behind) and the model runner on the
CPU, without HTTP. Writes step_cost.json and, with the extra `bench`, step_cost.svg.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine.cpu import decode_ms
from bench.engine.offline import sampling_of
from bench.local_engine import LocalEngine
from bench.machine import commit, machine
from bench.shapes_folder import described, shape_folder

_CONTEXT = 128
_ROWS = 16
"""Of the step that is timed after each part of the history."""
_AT_ONCE = 64
_HISTORY_PROMPT, _HISTORY_OUTPUT = 24, 2

Series = dict[int, float]
"""Milliseconds of a step, by what grows."""


def fit(series: Mapping[int, float]) -> tuple[float, float, float]:
    """(milliseconds at 0, milliseconds per unit, share of the variance explained) of the straight line through it."""
    x, y = np.array(list(series), dtype=float), np.array(list(series.values()))
    slope, start = np.polyfit(x, y, 1)
    spread = float(((y - y.mean()) ** 2).sum())
    left = float(((y - start - slope * x) ** 2).sum())
    return float(start), float(slope), 1 - left / spread if spread else 1.0


def over_rows(engine: LocalEngine, vocab_size: int, rows: Sequence[int], num_steps: int) -> Series:
    """By the number of rows, at one context."""
    return {n: statistics.median(decode_ms(engine, vocab_size, n, _CONTEXT, num_steps)) for n in rows}


def over_context(engine: LocalEngine, vocab_size: int, contexts: Sequence[int], num_steps: int) -> Series:
    """By the length of the prompt of a single row."""
    return {n: statistics.median(decode_ms(engine, vocab_size, 1, n, num_steps)) for n in contexts}


def over_history(engine: LocalEngine, vocab_size: int, finished: Sequence[int], num_steps: int) -> Series:
    """By the number of other requests, each with a prompt of its own, that have come and gone before."""
    rng, found, so_far = np.random.default_rng(2), dict[int, float](), 0
    for wanted in finished:
        while so_far < wanted:
            count = min(_AT_ONCE, wanted - so_far)
            prompts = rng.integers(5, vocab_size, (count, _HISTORY_PROMPT)).tolist()
            engine.run(prompts, sampling_of([_HISTORY_OUTPUT] * count))
            so_far += count
        found[wanted] = statistics.median(decode_ms(engine, vocab_size, _ROWS, _CONTEXT, num_steps))
    return found


def draw(record: Mapping[str, Any], target: Path) -> None:
    """Write the SVG: one panel for each series, with its straight line."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "penstock"}):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        for axes, (name, series) in zip(figure.subplots(1, 3), record["series"].items(), strict=True):
            x = [int(at) for at in series]
            start, slope, _ = record["fits"][name]
            axes.plot(x, [start + slope * at for at in x], "--", color="#999999")
            axes.plot(x, list(series.values()), "o", color="#0b6e99")
            axes.set(xlabel=name, ylabel="milliseconds a step")
            axes.set_ylim(bottom=0, top=1.15 * max(series.values()))
            axes.grid(alpha=0.3)
        figure.suptitle(
            f"{record['shape']}, {record['machine']['processor']}, threads: {record['threads']}", fontsize=10
        )
        figure.savefig(target, format="svg", metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", default="llama-tiny", help="a folder name in bench/shapes")
    add("--rows", default="1,2,4,8,16,24,32,48,64", help="numbers of rows, separated by commas")
    add("--contexts", default="128,256,512,1024,2048,4096,8192", help="lengths of prompts")
    add("--finished", default="0,1000,2500,5000,10000", help="numbers of finished requests")
    add("--steps", type=int, default=100, help="timed steps per figure")
    add("--threads", type=int, default=1)
    add("--out", type=Path, default=Path("build/step-cost"), help="folder for the results")
    args = parser.parse_args(argv)
    rows, contexts, finished = ([int(n) for n in text.split(",")] for text in (args.rows, args.contexts, args.finished))
    folder = shape_folder(args.shape)
    vocab_size = described(folder).vocab_size
    most_rows, longest = max(*rows, _ROWS, _AT_ONCE), max(contexts)
    engine = LocalEngine(
        folder,
        device="cpu",
        max_num_seqs=most_rows,
        max_num_batched_tokens=2048,
        max_model_len=longest + args.steps + 16,
        num_pages=(most_rows * (_CONTEXT + args.steps) + longest) // 16 + 2 * most_rows,
        num_threads=args.threads,
        enable_prefix_caching=True,
    )
    decode_ms(engine, vocab_size, _ROWS, _CONTEXT, 10)  # warm
    series = {
        "rows": over_rows(engine, vocab_size, rows, args.steps),
        "context": over_context(engine, vocab_size, contexts, args.steps),
        "finished requests": over_history(engine, vocab_size, finished, args.steps),
    }
    record = {
        "kind": "step_cost",
        "shape": args.shape,
        "commit": commit(),
        "machine": machine(),
        "threads": args.threads,
        "series": series,
        "fits": {name: fit(values) for name, values in series.items()},
    }
    for name, values in series.items():
        start, slope, explained = fit(values)
        print(f"{name}: " + ", ".join(f"{at}: {ms:.3f}" for at, ms in values.items()) + " ms")
        print(f"  {start:.3f} ms + {1e3 * slope:.4f} us each; the line explains {explained:.1%} of the variance")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "step_cost.json").write_text(json.dumps(record, indent=1) + "\n")
    try:
        draw(record, args.out / "step_cost.svg")
    except ImportError:
        print("no plot: it needs matplotlib, which the extra `bench` brings", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
