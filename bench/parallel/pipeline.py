"""Stages on cores of their own beside one worker with as many threads: tokens a second, in turn on the same machine.

python -m bench.parallel.pipeline [--shape NAME] [--stages 2] [--rows 1,16,32] [--out FILE.json]
"""

import argparse
import asyncio
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.machine import commit, machine
from bench.server_process import free_port, running
from bench.shapes_folder import servable_folder
from penstock.bench.load.client import run_job
from penstock.bench.load.job import Job, PlannedRequest
from penstock.bench.load.report import summarize

_NUM_PROMPT = 32


def measure(url: str, num_rows: int, num_new: int, seed: int) -> dict[str, Any]:
    """So many streams at once, all of the same length."""
    prompts = [[100 + (seed * 7919 + row * 31 + i) % 50000 for i in range(_NUM_PROMPT)] for row in range(num_rows)]
    requests = [PlannedRequest(0.0, prompt, num_new) for prompt in prompts]
    job = Job(f"{url}/v1", "m", "completions", requests, 0, time.time() + 0.1, token_ids=True)
    found = summarize(asyncio.run(run_job(job)))
    assert not found["num_failed"], found["errors"]
    return {"tokens_per_s": found["output_tokens_per_s"], "tpot_ms": found["tpot_ms"]["p50"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the ratios, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="a folder name in bench/shapes")
    parser.add_argument("--stages", type=int, default=2, help="and threads of the one worker")
    parser.add_argument("--rows", default="1,16,32", help="streams at once, separated by commas")
    parser.add_argument("--tokens", type=int, default=48, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    about: dict[str, Any] = {"commit": commit(), "machine": machine()}
    with ExitStack() as stack:
        folder = servable_folder(args.shape, Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model")
        urls: dict[str, str] = {}
        layouts = {"one worker": ("--num-threads", args.stages),
            "stages": ("--num-threads", 1, "--pipeline-parallel-size", args.stages)}  # fmt: skip
        for name, flags in layouts.items():
            port = free_port()
            urls[name] = f"http://127.0.0.1:{port}"
            options = ("--model", folder, "--served-model-name", "m", "--load-format", "dummy", "--device", "cpu",
                "--num-pages", 600, "--max-model-len", 512, "--port", port, *flags)  # fmt: skip
            command = [sys.executable, "-m", "penstock.cli", "serve", *map(str, options)]
            settings = {
                "PENSTOCK_SPARE_WORKER": "false",
                "PENSTOCK_LOG_LEVEL": "warning",
                "PENSTOCK_ENABLE_PREFIX_CACHING": "false",
            }
            stack.enter_context(running(command, f"{urls[name]}/ready", os.environ | settings, 180))
        found: list[dict[str, Any]] = []
        for rows in map(int, args.rows.split(",")):
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
            for number in range(args.rounds + 1):  # the first one warms up
                for name, url in urls.items():
                    runs[name].append(measure(url, rows, args.tokens, number))
            pairs = [
                (two["tokens_per_s"], one["tokens_per_s"])
                for one, two in zip(runs["one worker"][1:], runs["stages"][1:], strict=True)
            ]
            row: dict[str, Any] = {"rows": rows, "ratio": round(statistics.median(two / one for two, one in pairs), 3)}
            for name in urls:
                row[name] = {
                    key: round(statistics.median(run[key] for run in runs[name][1:]), 2)
                    for key in ("tokens_per_s", "tpot_ms")
                }
            found.append(row)
            print(json.dumps(row), flush=True)
    if args.out is not None:
        about["load_after"] = os.getloadavg()[0]
        about["command"] = shlex.join(
            ["python", "-m", "bench.parallel.pipeline", *(argv if argv is not None else sys.argv[1:])]
        )
        args.out.write_text(json.dumps(about | {"results": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
