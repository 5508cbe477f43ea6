"""Goodput under more load than there is capacity for, with clients that leave: what part of the capacity is of use.

    python -m bench.serving.overload --out overload.json

The model's steps take a fixed time and no processor's, so that the capacity is rows over step time on any machine, and
server and clients have the cores to themselves. Clients come at a fixed rate, stream one answer each on a connection of
their own, and close it after `--patience` seconds. A token counts if its answer came to its end. All options of the
server are at their defaults; `--flags` adds some.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop

from bench.server_process import free_port, running
from bench.shapes_folder import clockwork_folder
from penstock.models.families.registry import TEST_MODELS_VARIABLE

NUM_ROWS, STEP_SECONDS, NUM_TOKENS = 64, 0.05, 64
CAPACITY = NUM_ROWS / STEP_SECONDS / NUM_TOKENS
"""Requests a second."""


@dataclass(slots=True)
class Outcome:
    """What became of one request; times in seconds since it was sent."""

    sent_at: float
    status: int = 0
    first_token: float | None = None
    ended: float | None = None  # the answer, or the refusal
    has_left: bool = False


class Client(asyncio.Protocol):
    """One request on one connection, with as little work as it takes to see its first token and its end."""

    def __init__(self, request: bytes, outcome: Outcome, done: asyncio.Future[None]) -> None:
        self._request = request
        self._outcome = outcome
        self._done = done
        self._tail = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's classes are none of asyncio's
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        outcome, now = self._outcome, time.monotonic() - self._outcome.sent_at
        data = self._tail + data
        if not outcome.status:
            outcome.status = int(data[9:12])
        if outcome.first_token is None and b"data: {" in data:
            outcome.first_token = now
        if b"data: [DONE]" in data or outcome.status != 200:
            outcome.ended = now
            self.leave()
        self._tail = data[-16:]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def leave(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def ask(port: int, prompt: list[int], patience: float) -> Outcome:
    """Send one request and stay for its answer, or for as long as the patience lasts."""
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True,
                       "ignore_eos": True}).encode()  # fmt: skip
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    outcome = Outcome(time.monotonic())
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    try:
        _, client = await loop.create_connection(
            lambda: Client(f"{head}\r\nConnection: close\r\n\r\n".encode() + body, outcome, done), "127.0.0.1", port
        )
    except OSError:
        return outcome
    try:
        await asyncio.wait_for(done, patience)
    except TimeoutError:
        outcome.has_left = True
        client.leave()
    return outcome


async def load(port: int, overload: float, seconds: float, patience: float) -> list[Outcome]:
    """All requests of one run, sent at an even pace."""
    rate, began, asked = overload * CAPACITY, time.monotonic(), []
    for i in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began + i / rate - time.monotonic()))
        asked.append(asyncio.create_task(ask(port, [3 + i % 90, 3 + i // 90 % 90, 3 + i // 8100], patience)))
    return list(await asyncio.gather(*asked))


def percentile(values: list[float], share: float) -> float | None:
    values = sorted(values)
    return round(values[min(len(values) - 1, int(len(values) * share))], 4) if values else None


def summary(overload: float, found: list[Outcome], seconds: float) -> dict[str, object]:
    """Goodput over the time in which requests came, and a whole answer's time after the first one."""
    began = found[0].sent_at
    service = NUM_TOKENS * STEP_SECONDS
    served = [each for each in found if each.status == 200 and each.ended is not None]
    in_time = [each for each in served if each.ended is not None and each.sent_at + each.ended <= began + seconds]
    refused = [each.ended for each in found if each.status == 429 and each.ended is not None]
    waits = [each.first_token for each in found if each.first_token is not None]
    return {
        "overload": overload,
        "requests": len(found),
        "served": len(served),
        "refused": len(refused),
        "left": sum(each.has_left for each in found),
        "failed": sum(each.status not in (200, 429) and not each.has_left for each in found),
        "goodput_of_capacity": round(len(in_time) / (CAPACITY * (seconds - service)), 3),
        "ttft_s": {"p50": percentile(waits, 0.5), "p99": percentile(waits, 0.99)},
        "refusal_s": {"p50": percentile(refused, 0.5), "p99": percentile(refused, 0.99)},
    }


def measure(overload: float, seconds: float, patience: float, flags: list[str]) -> dict[str, object]:
    """One run against a server of its own."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        model = clockwork_folder(Path(folder) / "m", STEP_SECONDS)
        command = [
            sys.executable,
            "-m",
            "penstock.cli",
            "serve",
            str(model),
            "--served-model-name",
            "m",
        ]
        command += ["--port", str(port), "--num-threads", "1", "--max-num-seqs", str(NUM_ROWS), *flags]
        environment = os.environ | {"PENSTOCK_LOG_LEVEL": "warning", TEST_MODELS_VARIABLE: "1"}
        with running(command, f"http://127.0.0.1:{port}/ready", environment, 120):
            return summary(overload, uvloop.run(load(port, overload, seconds, patience)), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overload", default="2,5,20", help="times the capacity, comma-separated")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long requests come")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds after which a client leaves")
    parser.add_argument("--flags", default="", help="further options of the server")
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    arguments = parser.parse_args()
    found = []
    for overload in map(float, arguments.overload.split(",")):
        found.append(measure(overload, arguments.seconds, arguments.patience, arguments.flags.split()))
        print(json.dumps(found[-1]), flush=True)
    if arguments.out is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        facts = {"commit": commit.stdout.strip(), "cores": os.cpu_count(), "capacity_requests_per_s": CAPACITY}
        settings = {"patience_s": arguments.patience, "seconds": arguments.seconds, "flags": arguments.flags}
        arguments.out.write_text(json.dumps(facts | settings | {"runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
