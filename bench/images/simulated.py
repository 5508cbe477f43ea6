"""How far simulations of images are off: requests with images and without are served, recorded, and simulated.

    python -m bench.images.simulated --out images_simulated.json

Costs are fitted to the recording of the first load. The second, whose requests come faster, is simulated by these, from
what its recording says of its requests. Times until the first token count from a request's arrival at the scheduler.
The model is a Qwen2.5-VL of random weights, on one thread. Run it on a quiet machine.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from msgspec.structs import replace

from bench.images.flood import pictures, write_checkpoint
from bench.machine import commit, machine
from bench.server_process import free_port, running
from bench.serving.batches import START_SECONDS
from penstock.config import Config
from penstock.lab.simulation.figures import spread
from penstock.lab.simulation.study import Load, Machine, Measured, compare, measured

_NUM_WARM = 6


def bodies(count: int, size: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Chats: a half has images, of which one in five was shown before."""
    urls, shown = pictures(size), list[str]()
    for number in range(count):
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"{number} word " * rng.randint(3, 60)}]
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
            shown.append(rng.choice(shown) if shown and rng.random() < 0.2 else next(urls))
            parts.append({"type": "image_url", "image_url": {"url": shown[-1]}})
        messages = [{"role": "user", "content": parts}]
        yield {"messages": messages, "max_tokens": rng.randint(8, 64), "ignore_eos": True}


async def send(url: str, rate: float, count: int, size: int, seed: int) -> None:
    """So many chats in a Poisson process, after some to warm up."""
    rng, tasks = random.Random(seed), list[asyncio.Task[None]]()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as http:

        async def chat(body: dict[str, Any]) -> None:
            async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
                if answer.status != 200:
                    raise RuntimeError(await answer.text())
                await answer.read()

        for body in bodies(_NUM_WARM, 56, random.Random(seed)):
            await chat(body)
        for body in bodies(count, size, rng):
            tasks.append(asyncio.create_task(chat(body)))
            await asyncio.sleep(rng.expovariate(rate))
        await asyncio.gather(*tasks)


def simulated(on: Machine, served: Measured) -> list[float]:
    """Seconds until the first token of each request, without the way to its client."""
    on = on._replace(timing=replace(on.timing, request=0.0, request_per_token=0.0, reply=0.0))
    (result,) = compare(on, Load(served.arrivals, page_size=served.page_size), {"served": Config()})
    return [outcome.ttft for outcome in result.run.outcomes]


def compared(on: Machine, served: Measured) -> dict[str, Any]:
    """Mean, p50 and p99 of what was measured and what is simulated, with images as they are and as texts."""
    as_texts = [replace(each, images=()) for each in served.arrivals]
    times: dict[str, Sequence[float]] = {
        "measured": [each.first for each in served.delays],
        "simulated": simulated(on, served),
        "simulated_as_texts": simulated(on._replace(tower=None), served._replace(arrivals=as_texts)),
    }
    found: dict[str, Any] = {}
    for kind, has_images in (("with_images", True), ("texts", False)):
        chosen = [i for i, each in enumerate(served.arrivals) if i >= _NUM_WARM and bool(each.images) == has_images]
        ttft = {name: spread([each[i] for i in chosen]) for name, each in times.items()}
        found[kind] = {"num_requests": len(chosen), "ttft_ms": ttft}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs=2, default=(1.0, 1.8), help="requests a second, of both loads")
    parser.add_argument("--requests", type=int, default=100, help="of each load")
    parser.add_argument("--size", type=int, default=224, help="pixels of an image's side")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    facts, runs = machine(), list[Measured]()  # its load is that before this one
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder / "model")
        for seed, rate in enumerate(options.rates):
            port, record = free_port(), folder / f"{seed}.jsonl"
            command = [sys.executable, "-m", "penstock.cli", "serve", str(folder / "model"), "--port", str(port)]
            command += ["--record", str(record), "--num-threads", "1"]
            url, environment = f"http://127.0.0.1:{port}", os.environ | {"PENSTOCK_LOG_LEVEL": "warning"}
            with running(command, f"{url}/ready", environment, START_SECONDS):
                asyncio.run(send(url, rate, options.requests, options.size, seed))
            runs.append(measured(record))
    first = runs[0].machine
    result: dict[str, Any] = {"commit": commit(), **facts, "options": vars(options) | {"out": str(options.out)}}
    result |= {name: compared(first, run) for name, run in zip(("fitted", "predicted"), runs, strict=True)}
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
