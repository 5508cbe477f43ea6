"""Prefill and decode on two engines of one thread each, against one engine with two threads.

    python -m bench.parallel.prefill_decode --out prefill_decode.json

Clients send requests with long prompts, one after the other, so that prompts come all the time beside running decodes.
The time between tokens is what a client sees between two events of a stream. Throughput is requests per second over
the whole run, whose last requests, without others beside them, count too. Weights are random.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.machine import commit, machine
from bench.server_process import free_port, running
from bench.shapes_folder import servable_folder
from penstock.bench.load.client import run_job
from penstock.bench.load.job import Job, PlannedRequest
from penstock.bench.load.report import summarize

LEAST_TIMES_LOWER, LEAST_THROUGHPUT = 3.0, 0.8
SERVERS = {
    "mixed": ("--num-threads", "2"),
    "apart": ("--data-parallel-size", "2", "--role", "prefill,decode", "--num-threads", "1"),
}


def load(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All requests, after one that warms up: what clients saw of them."""
    rng, longest = random.Random(0), arguments.output_len

    def planned(max_tokens: int) -> PlannedRequest:
        return PlannedRequest(0.0, [rng.randrange(5, 250) for _ in range(arguments.prompt_len)], max_tokens)

    # Outputs of different lengths, so that prompts do not come all at once.
    lens = [rng.randint(longest // 2, longest * 3 // 2) for _ in range(arguments.requests)]
    for requests in [planned(4)], [planned(length) for length in lens]:
        job = Job(f"{url}/v1", "m", "completions", requests, arguments.clients, time.time(), timeout=3600.0)
        seen = summarize(asyncio.run(run_job(job)))
        if seen["num_failed"]:
            raise RuntimeError(f"{seen['num_failed']} requests failed: {seen['errors']}")
    return seen


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run against a server of its own."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "penstock.cli", "serve", "--port", str(port), *SERVERS[name]]
        command += ["--served-model-name", "m"]
        if arguments.shape:
            command += [str(servable_folder(arguments.shape, Path(folder) / "m")), "--load-format", "dummy"]
        environment = os.environ | {"PENSTOCK_LOG_LEVEL": "warning"}
        with running(command, f"{url}/ready", environment, 300):
            return {"server": " ".join(SERVERS[name])} | load(url, arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="dense-0.1b", help="a shape of bench/shapes; empty: the demo model")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=400, help="mean")
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    arguments = parser.parse_args()
    facts: dict[str, Any] = {"commit": commit(), "machine": machine()}
    facts |= {name: value for name, value in vars(arguments).items() if name != "out"}
    for name in SERVERS:
        facts[name] = measure(name, arguments)
        print(name, json.dumps(facts[name]), flush=True)
    times_lower = facts["mixed"]["itl_ms"]["p99"] / facts["apart"]["itl_ms"]["p99"]
    throughput = facts["apart"]["requests_per_s"] / facts["mixed"]["requests_per_s"]
    facts |= {"p99_times_lower": round(times_lower, 2), "throughput": round(throughput, 3)}
    print(f"time between tokens, p99: {times_lower:.1f} times lower; throughput: {throughput:.2f} times")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")
    return int(times_lower < LEAST_TIMES_LOWER or throughput < LEAST_THROUGHPUT)


if __name__ == "__main__":
    sys.exit(main())
