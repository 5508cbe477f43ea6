"""What the router gains: cache hits, balance, and what a second engine on a second core brings.

    python -m bench.parallel.routing --out routing.json

Real engines with the demo model behind one server, three parts:

    prefix   conversations under 24 system prompts, twice what one engine's pages hold. The same conversations by
             each way of choosing: prompt tokens found cached, tokens computed by each engine, time to the first token
    hot      all requests have one long prefix: what each engine has to do
    scale    a mixed load on one engine, everything on one core, and on two engines, a core each, in turns

Clients wait for an answer before they go on. Which system prompts, lengths and words follow from the seed alone; who
comes when does not. Needs two cores, which should have nothing else to do: --parts prefix,hot tolerates others.
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
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.machine import commit, machine
from bench.server_process import free_port, running

MODEL = Path(__file__).resolve().parents[2] / "demo/model"
_WAYS = ("round-robin", "prefix")
_PAUSE_SECONDS = 0.5
"""After a load: engines tell their counters a few times a second."""


class Turn(NamedTuple):
    """What a user adds to a conversation, and how long the answer is."""

    tokens: list[int]
    num_output: int


Conversation = list[Turn]


@dataclass
class Result:
    """What clients saw of a load."""

    seconds: float = 0.0
    num_prompt: int = 0  # tokens, and so are the next two
    num_cached: int = 0
    num_output: int = 0
    latencies: list[float] = field(default_factory=list)  # seconds, of answers
    requests_at: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by engine


def words(rng: random.Random, count: int) -> list[int]:
    """Random ids, none of them special."""
    return [rng.randrange(300, 4000) for _ in range(count)]


def conversations(seed: int, num_users: int, per_user: int) -> list[list[Conversation]]:
    """For each user, one after the other: one of 24 system prompts of 1,024 tokens, and a short turn or two."""
    rng = random.Random(seed)
    systems = [words(rng, 1024) for _ in range(24)]
    found = []
    for _ in range(num_users):
        mine = []
        for _ in range(per_user):
            turns = [
                Turn(words(rng, rng.randint(24, 64)), rng.randint(16, 48)) for _ in range(rng.choice((1, 1, 1, 1, 2)))
            ]
            turns[0] = Turn(rng.choice(systems) + turns[0].tokens, turns[0].num_output)
            mine.append(turns)
        found.append(mine)
    return found


def hot(seed: int, num_users: int, per_user: int) -> list[list[Conversation]]:
    """Single requests that have their first 1,024 tokens in common."""
    rng = random.Random(seed)
    prefix = words(rng, 1024)
    return [
        [[Turn(prefix + words(rng, rng.randint(16, 64)), rng.randint(32, 96))] for _ in range(per_user)]
        for _ in range(num_users)
    ]


def mixed(seed: int, num_users: int, per_user: int) -> list[list[Conversation]]:
    """Conversations and strangers' prompts, long and short ones, in turns."""
    rng = random.Random(seed)
    known = conversations(seed, num_users, per_user)
    for mine in known:
        for i in range(0, per_user, 2):
            mine[i] = [Turn(words(rng, rng.randint(32, 640)), rng.randint(16, 96))]
    return known


async def _user(
    session: aiohttp.ClientSession, url: str, mine: Sequence[Conversation], pause: float, rng: random.Random, to: Result
) -> None:
    for conversation in mine:
        known: list[int] = []
        for turn in conversation:
            known += turn.tokens
            body = {
                "model": "m", "prompt": known, "max_tokens": turn.num_output, "ignore_eos": True, "temperature": 0,
                "return_token_ids": True,
            }  # fmt: skip
            began = time.monotonic()
            async with session.post(f"{url}/v1/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
            to.latencies.append(time.monotonic() - began)
            to.requests_at[response.headers.get("x-penstock-engine", "0")] += 1
            usage = answer["usage"]
            to.num_prompt += usage["prompt_tokens"]
            to.num_cached += usage["prompt_tokens_details"]["cached_tokens"]
            to.num_output += usage["completion_tokens"]
            known += answer["choices"][0]["token_ids"]
            await asyncio.sleep(rng.expovariate(1 / pause) if pause else 0)


async def _load(url: str, users: Sequence[Sequence[Conversation]], pause: float) -> Result:
    result = Result()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.monotonic()
        rngs = [random.Random(number) for number in range(len(users))]
        await asyncio.gather(
            *(_user(session, url, mine, pause, rng, result) for mine, rng in zip(users, rngs, strict=True))
        )
        result.seconds = time.monotonic() - began
    return result


async def _metrics(url: str) -> dict[str, dict[str, float]]:
    """Metric -> engine -> sum over other labels."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        text = await response.text()
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name][sample.labels.get("engine", "0")] += sample.value
    return found


async def _all_ready(url: str, num_engines: int) -> None:
    async with asyncio.timeout(120):
        while sum((await _metrics(url))["penstock_engine_ready"].values()) < num_engines:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.1)


@contextmanager
def _server(num_engines: int, flags: Sequence[str], cores: Sequence[int] = ()) -> Iterator[str]:
    """Engines with a thread each. With `cores` engine i has the i-th of them, and everything else all of them."""
    port = free_port()
    command = [sys.executable, "-m", "penstock.cli", "serve", str(MODEL), "--served-model-name", "m"]
    command += ["--port", str(port), "--num-threads", "1", "--no-spare-worker"]
    command += ["--data-parallel-size", str(num_engines), *flags]
    url = f"http://127.0.0.1:{port}"
    all_cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores or all_cores)  # what is started has the same
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"PENSTOCK_LOG_LEVEL": "warning"}
            with running(command, f"{url}/ready", environment, 120, Path(folder) / "log"):
                asyncio.run(_all_ready(url, num_engines))  # the server is ready with one
                for process in psutil.Process().children(recursive=True):
                    kind, _, numbers = process.name().removeprefix("penstock-").partition("-")
                    if num_engines > 1 and cores and kind in ("scheduler", "worker"):
                        process.cpu_affinity([cores[int(numbers.split("-")[0])]])
                yield url
    finally:
        os.sched_setaffinity(0, all_cores)


def _balance(by_engine: dict[str, float]) -> float:
    """How much more than the mean the busiest engine has."""
    return max(by_engine.values()) / statistics.fmean(by_engine.values()) - 1


async def _measured(url: str, users: Sequence[Sequence[Conversation]], pause: float) -> dict[str, Any]:
    result = await _load(url, users, pause)
    await asyncio.sleep(_PAUSE_SECONDS)
    told = await _metrics(url)
    prompts, hits, outputs = (
        told[f"penstock_{name}_total"]
        for name in ("engine_prompt_tokens", "prefix_cache_hits", "engine_generation_tokens")
    )
    computed = {engine: prompts[engine] - hits[engine] + outputs[engine] for engine in sorted(prompts)}
    expected, found = (sum(told[f"penstock_router_{name}_tokens_total"].values()) for name in ("expected", "found"))
    ordered = sorted(result.latencies)
    return {
        "seconds": round(result.seconds, 2),
        "requests": len(ordered),
        "requests_by_engine": dict(sorted(result.requests_at.items())),
        "prompt_tokens": result.num_prompt,
        "cached_tokens": result.num_cached,
        "hit_rate": round(result.num_cached / result.num_prompt, 4),
        "computed_by_engine": computed,
        "busiest_over_mean": round(_balance(computed), 4),
        "tokens_per_s": round((result.num_prompt + result.num_output) / result.seconds, 1),
        "answer_ms": {
            "p50": round(1e3 * ordered[len(ordered) // 2]),
            "p99": round(1e3 * ordered[-len(ordered) // 100]),
        },
        "expected_tokens": expected,
        "found_tokens": found,
    }


def measure_prefix(seed: int) -> dict[str, Any]:
    """Each way of choosing on the same conversations, with engines that are new."""
    users = conversations(seed, 16, 32)
    found = {}
    for way in _WAYS:
        with _server(2, ["--routing", way, "--num-pages", "840", "--max-num-seqs", "16"]) as url:
            found[way] = asyncio.run(_measured(url, users, 0.05))
        print(f"prefix, {way}:", json.dumps(found[way]), flush=True)
    ratio = found["prefix"]["cached_tokens"] / max(1, found["round-robin"]["cached_tokens"])
    print(f"    cache hits: {ratio:.2f} times those of round robin", flush=True)
    return found | {"hits_over_round_robin": round(ratio, 3)}


def measure_hot(seed: int) -> dict[str, Any]:
    """One prefix for all."""
    users = hot(seed, 24, 8)
    found = {}
    for way in ("least-loaded", "prefix"):
        with _server(2, ["--routing", way, "--max-num-seqs", "16"]) as url:
            found[way] = asyncio.run(_measured(url, users, 0.0))
        print(f"hot, {way}:", json.dumps(found[way]), flush=True)
    return found


def measure_scale(seed: int, rounds: int) -> dict[str, Any]:
    """One engine on one core, two engines on two cores, in turns; more users than either has rows."""
    users = mixed(seed, 48, 4)
    cores = sorted(os.sched_getaffinity(0))[:2]
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for num_engines in (1, 2):
            with _server(num_engines, ["--max-num-seqs", "16", "--queue-patience", "0"], cores[:num_engines]) as url:
                measured = asyncio.run(_measured(url, users, 0.0))
            speeds[num_engines].append(measured["tokens_per_s"])
            print(f"scale, {num_engines}:", json.dumps(measured), flush=True)
    ratios = [two / one for one, two in zip(speeds[1], speeds[2], strict=True)]
    print(f"    two engines: {statistics.median(ratios):.2f} times one", flush=True)
    return {"tokens_per_s": speeds, "ratios": ratios, "two_over_one": round(statistics.median(ratios), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="prefix,hot,scale", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=3, help="of scale")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"commit": commit(), "machine": machine(), "seed": arguments.seed}
    for part in arguments.parts.split(","):
        if part == "prefix":
            found[part] = measure_prefix(arguments.seed)
        elif part == "hot":
            found[part] = measure_hot(arguments.seed)
        elif part == "scale":
            found[part] = measure_scale(arguments.seed, arguments.rounds)
        else:
            parser.error(f"there is no part {part!r}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
