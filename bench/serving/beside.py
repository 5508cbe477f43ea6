"""What vectors cost the streams of the same model: the time between two tokens, alone and beside texts, in turns.

    python -m bench.serving.beside --streams 4 --rounds 6 --write FILE

The model is a public one's shape with random weights, or the checkpoint FOLDER of a decoder. A few clients generate all
the time. In every second period others ask for vectors of short texts (token ids), each as soon as it has had its last
answer. A period is compared with the one before it, so that a machine that becomes slower does so for both; what counts
is the median of these ratios, of the 99th percentiles of the times between two tokens. The machine must be quiet for
them; the ratios of the medians (50) bear more.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from bench.machine import command, commit, machine
from bench.server_process import free_port, running
from bench.shapes_folder import NUM_BYTES, servable_folder

_SHORTEST, _LONGEST = 6, 40  # tokens of a text
_START_SECONDS = 300.0
_PERIODS = ("alone", "beside_texts")
_RANKS = (50, 99)  # percentiles


class Clients:
    """Those that generate, and those that want vectors."""

    def __init__(self, url: str, session: aiohttp.ClientSession, texts_per_request: int) -> None:
        self._url = url
        self._session = session
        self._size = texts_per_request
        self._draw = random.Random(0)
        self.gaps: list[float] = []
        self.num_texts = 0

    async def stream(self) -> None:
        """Generate text after text, and note the seconds between two tokens."""
        while True:
            body = {"prompt": self._text(), "max_tokens": 200, "stream": True, "ignore_eos": True}
            async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                last = 0.0
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        now = time.perf_counter()
                        if last:
                            self.gaps.append(now - last)
                        last = now

    async def embed(self) -> None:
        """Ask for vectors, again and again."""
        while True:
            body = {"input": [self._text() for _ in range(self._size)], "encoding_format": "base64"}
            async with self._session.post(f"{self._url}/v1/embeddings", json=body) as answer:
                answer.raise_for_status()
                await answer.read()
            self.num_texts += self._size

    def _text(self) -> list[int]:
        return [self._draw.randrange(NUM_BYTES) for _ in range(self._draw.randint(_SHORTEST, _LONGEST))]


async def _measured(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """All periods."""
    seconds: dict[str, dict[int, list[float]]] = {name: {rank: [] for rank in _RANKS} for name in _PERIODS}
    rates = []
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
        clients = Clients(url, session, options.texts_per_request)
        streams = [group.create_task(clients.stream()) for _ in range(options.streams)]
        await asyncio.sleep(options.seconds / 2)
        for _ in range(options.rounds):
            for name in _PERIODS:
                connections = options.connections if name == "beside_texts" else 0
                asking = [group.create_task(clients.embed()) for _ in range(connections)]
                clients.gaps.clear()
                num_before = clients.num_texts
                await asyncio.sleep(options.seconds)
                for rank, its in seconds[name].items():
                    its.append(float(np.percentile(clients.gaps, rank)))
                if asking:
                    rates.append((clients.num_texts - num_before) / options.seconds)
                for task in asking:
                    task.cancel()
                await asyncio.sleep(0.5)  # what was asked for is forgotten
        for task in streams:
            task.cancel()
    alone, beside = (seconds[name] for name in _PERIODS)
    ratios = {rank: [b / a for a, b in zip(alone[rank], beside[rank], strict=True)] for rank in _RANKS}
    return {
        "seconds_between_tokens": seconds,
        "ratios": ratios,
        "median_ratios": {rank: statistics.median(its) for rank, its in ratios.items()},
        "texts_per_second": statistics.median(rates),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start the server, and measure."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as room:
        folder = options.folder or servable_folder(options.shape, Path(room, options.shape))
        loading = () if options.folder else ("--load-format", "dummy")
        serve = [
            *(sys.executable, "-m", "penstock.cli", "serve", str(folder), "--port", str(port), *loading),
            *("--num-threads", str(options.threads), "--device", options.device, *options.serve.split()),
        ]
        with running(serve, f"{url}/ready", dict(os.environ), _START_SECONDS, Path(room, "log")):
            return asyncio.run(_measured(url, options))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--shape", default="qwen3-0.6b", help="of `bench/shapes/`, without a FOLDER")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--connections", type=int, default=2, help="clients that want vectors")
    parser.add_argument("--texts-per-request", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a period")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--serve", default="", help="more options of `penstock serve`")
    parser.add_argument("--write", type=Path, help="a JSON file for the record")
    options = parser.parse_args(argv)
    told = {"command": command("bench.serving.beside", argv), "commit": commit(), "machine": machine()}
    found = measure(options)
    print(json.dumps(found, indent=2))
    if options.write is not None:
        options.write.write_text(json.dumps(told | found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
