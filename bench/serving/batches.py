"""What streams feel of a batch that runs beside them: times between their tokens with it, and without.

    python -m bench.serving.batches --shape qwen2.5-0.5b --out batches.json

Some clients stream one chat after another, each on a connection of its own. First they are alone, then with a batch
that does not end meanwhile, and so on in turns, so that a machine that changes its pace does it to both.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from bench.machine import commit, machine
from bench.server_process import free_port, running
from bench.shapes_folder import servable_folder

START_SECONDS = 600.0


async def stream(http: aiohttp.ClientSession, url: str, number: int, num_tokens: int) -> list[float]:
    """One chat; when its pieces came, by `time.monotonic`."""
    content = f"Chat {number}: " + "tell me more. " * 8
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": num_tokens, "stream": True}
    body |= {"ignore_eos": True, "seed": number}
    times = []
    async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
    return times[1:]  # the first one is no token


async def phase(http: aiohttp.ClientSession, url: str, clients: int, num_tokens: int, seconds: float) -> list[float]:
    """The gaps between tokens that all clients saw, in milliseconds.

    Answers have half to one and a half times so many tokens: clients whose answers are equally long fall into step, and
    then their prompts come together in some phases, and apart in others.
    """
    end, gaps = time.monotonic() + seconds, list[float]()

    async def client(number: int) -> None:
        lengths = random.Random(number)
        while time.monotonic() < end:
            times = await stream(http, url, number, lengths.randint(num_tokens // 2, num_tokens * 3 // 2))
            gaps.extend((later - before) * 1e3 for before, later in pairwise(times))

    await asyncio.gather(*map(client, range(clients)))
    return gaps


def lines(number: int) -> bytes:
    """A batch that is longer than a phase."""
    found = []
    for each in range(number):
        content = f"Line {each}: " + "count on. " * 16
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 128, "ignore_eos": True, "seed": each}
        found.append({"custom_id": f"{each}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    return "".join(json.dumps(each) + "\n" for each in found).encode()


async def start_batch(http: aiohttp.ClientSession, url: str, num_lines: int) -> str:
    """The id of a batch whose first lines are under way."""
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", lines(num_lines), filename="in.jsonl")
    async with http.post(f"{url}/v1/files", data=form) as answer:
        file_id = (await answer.json())["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    async with http.post(f"{url}/v1/batches", json=body) as answer:
        batch_id = str((await answer.json())["id"])
    while True:
        async with http.get(f"{url}/metrics") as answer:
            if "penstock_num_requests_running 0.0" not in await answer.text():
                return batch_id
        await asyncio.sleep(0.2)


async def end_batch(http: aiohttp.ClientSession, url: str, batch_id: str) -> int:
    """Cancel it; how many lines it had answered."""
    async with http.get(f"{url}/v1/batches/{batch_id}") as answer:
        done = int((await answer.json())["request_counts"]["completed"])
    async with http.post(f"{url}/v1/batches/{batch_id}/cancel") as answer:
        answer.raise_for_status()
    while True:
        async with http.get(f"{url}/v1/batches/{batch_id}") as answer:
            if (await answer.json())["status"] == "cancelled":
                return done
        await asyncio.sleep(0.2)


def percentiles(values: list[float]) -> dict[str, float]:
    """Of gaps in milliseconds."""
    ordered = sorted(values)
    return {
        f"p{share}": round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 3) for share in (50, 90, 99)
    }


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[float]] = {"alone": [], "with_batch": []}
    num_lines, answered_alone = 0, 0.0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as http:
        await phase(http, url, options.clients, options.tokens, options.seconds / 2)  # step times are learned
        for _ in range(options.rounds):
            found["alone"] += await phase(http, url, options.clients, options.tokens, options.seconds)
            batch = await start_batch(http, url, options.lines)
            found["with_batch"] += await phase(http, url, options.clients, options.tokens, options.seconds)
            num_lines += await end_batch(http, url, batch)
        batch, began = await start_batch(http, url, options.lines), time.monotonic()
        await asyncio.sleep(options.seconds)
        answered_alone = await end_batch(http, url, batch) / (time.monotonic() - began)
    result: dict[str, Any] = {name: percentiles(gaps) | {"tokens": len(gaps)} for name, gaps in found.items()}
    result["p99_ratio"] = round(result["with_batch"]["p99"] / result["alone"]["p99"], 3)
    result["lines_per_s"] = {
        "beside_streams": round(num_lines / (options.rounds * options.seconds), 3),
        "alone": round(answered_alone, 3),
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="", help="of a model with random weights (default: the demo model)")
    parser.add_argument("--clients", type=int, default=4, help="that stream at a time")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=3, help="of both phases")
    parser.add_argument("--lines", type=int, default=5000, help="of the batch")
    parser.add_argument("--flags", default="", help="further options of the server")
    parser.add_argument("--note", default="", help="what else the record should say of the machine")
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    options = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "penstock.cli", "serve"]
        if options.shape:
            command += [str(servable_folder(options.shape, Path(folder) / "m")), "--load-format", "dummy"]
        command += ["--port", str(port), "--data-dir", f"{folder}/data", *options.flags.split()]
        environment = os.environ | {"PENSTOCK_LOG_LEVEL": "warning"}
        with running(command, f"http://127.0.0.1:{port}/ready", environment, START_SECONDS):
            found = asyncio.run(measure(f"http://127.0.0.1:{port}", options))
    settings = {name: value for name, value in vars(options).items() if name != "out" and value != ""}
    record = {"commit": commit(), "machine": machine(), "settings": settings} | found
    print(json.dumps(record, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
