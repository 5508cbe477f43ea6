"""How well steps with prompts keep to --max-prefill-ms, beside streams.

    python -m bench.scheduling.prefill_pace --bounds 20,50 --out pace.json

A server with a step trace, some streams, and long prompts one after the other. Of the steps that have both, the share
that took at most 1.2 times the bound, and how predicted and measured times compare. The default is the demo model.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from bench.server_process import free_port, running
from bench.shapes_folder import servable_folder

TOLERANCE = 1.2


async def stream(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with http.post(url, json=body | {"stream": True}) as response:
        async for _ in response.content:
            pass


async def load(port: int, num_streams: int, prompt_len: int, seconds: float) -> None:
    """Streams that go on all the time, and prompts of random tokens one after the other."""
    url, rng, ends_at = f"http://127.0.0.1:{port}/v1/completions", random.Random(0), time.monotonic() + seconds

    def body(num_tokens: int, max_tokens: int) -> dict[str, Any]:
        prompt = [rng.randrange(5, 250) for _ in range(num_tokens)]
        return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}

    async def go_on(num_tokens: int, max_tokens: int) -> None:
        while time.monotonic() < ends_at:
            await stream(http, url, body(num_tokens, max_tokens))

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        await asyncio.gather(*(go_on(16, 400) for _ in range(num_streams)), go_on(prompt_len, 1))


def _at(values: list[float], share: float) -> float | None:
    """The value that this share of the sorted values does not exceed."""
    return round(values[min(len(values) - 1, int(len(values) * share))], 3) if values else None


def summary(trace: Path, max_ms: int) -> dict[str, object]:
    """Of the trace's steps with both decodes and a chunk of a prompt."""
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    decodes_only = sorted(step["forward_us"] for step in steps if step["num_tokens"] == step["num_rows"])
    mixed = [step for step in steps if step["num_rows"] > 1 and step["num_tokens"] > step["num_rows"]]
    times = sorted(step["forward_us"] for step in mixed)
    ratios = sorted(step["forward_us"] / step["predicted_us"] for step in mixed if step["predicted_us"])
    return {
        "max_prefill_ms": max_ms,
        "mixed_steps": len(mixed),
        "within_1.2_times": round(sum(us <= TOLERANCE * max_ms * 1000 for us in times) / max(1, len(times)), 4),
        "forward_ms": {f"p{int(share * 100)}": _at([us / 1000 for us in times], share) for share in (0.5, 0.95, 0.99)},
        "measured_over_predicted": {f"p{int(share * 100)}": _at(ratios, share) for share in (0.05, 0.5, 0.95)},
        "decodes_only_ms_p50": _at([us / 1000 for us in decodes_only], 0.5),
    }


def measure(arguments: argparse.Namespace, max_ms: int) -> dict[str, object]:
    """One run against a server of its own."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "steps.jsonl"
        command = [sys.executable, "-m", "penstock.cli", "serve"]
        if arguments.shape:
            command += [str(servable_folder(arguments.shape, Path(folder) / "m")), "--load-format", "dummy"]
        command += ["--port", str(port), "--max-prefill-ms", str(max_ms), "--step-trace", str(trace)]
        with running(command, f"http://127.0.0.1:{port}/ready", os.environ | {"PENSTOCK_LOG_LEVEL": "warning"}, 300):
            asyncio.run(load(port, arguments.streams, arguments.prompt_len, arguments.seconds))
        return summary(trace, max_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bounds", default="20,50", help="values of --max-prefill-ms, comma-separated")
    parser.add_argument(
        "--shape", default="", help="a shape of bench/shapes with random weights, in place of the demo model"
    )
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=1600)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    arguments = parser.parse_args()
    found = []
    for max_ms in map(int, arguments.bounds.split(",")):
        found.append(measure(arguments, max_ms))
        print(json.dumps(found[-1]), flush=True)
    if arguments.out is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        facts = {"commit": commit.stdout.strip(), "cores": os.cpu_count(), "shape": arguments.shape or "demo"}
        arguments.out.write_text(json.dumps(facts | {"runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
