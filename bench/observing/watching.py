"""What it costs when somebody watches a server's steps, and when nobody does.

    python -m bench.observing.watching [--base PYTHON] [--rounds 12]
    python -m bench.observing.watching --steps

Rounds of the same load take turns: nobody watches; one client reads `/debug/steps`; and, with `--base`, the server of
another commit (its Python, with Penstock installed) that nobody watches. Told are output tokens a second, and processor
seconds of the server's processes for a thousand tokens, which other work on the machine disturbs less.

With `--steps`: the processor time that a feed adds to the scheduler's own, at a thousand steps a second.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import psutil

from bench.machine import commit, machine
from bench.scheduling.scheduler import add_requests, answer, make_scheduler
from bench.server_process import free_port, running
from penstock.ipc.messages import StepPlan
from penstock.parts.watching.scheduler.feed import Feed
from penstock.parts.watching.scheduler.watchers import INTERVAL

_START_SECONDS = 240.0
STEP_SECONDS = 0.001
_PROMPT = "Once upon a time "
_MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"


class Served(NamedTuple):
    """A server: its address, and its processes."""

    url: str
    processes: list[psutil.Process]


@contextmanager
def serving(python: str, folder: Path, threads: int) -> Iterator[Served]:
    """A server of the demo model."""
    port = free_port()
    command = [python, "-m", "penstock.cli", "serve", str(_MODEL), "--port", str(port), "--max-num-seqs", "64"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    log, before = folder / f"{port}.log", psutil.Process().children()
    with running(command, f"http://127.0.0.1:{port}/ready", environment, _START_SECONDS, log):
        [process] = [child for child in psutil.Process().children() if child not in before]
        yield Served(f"http://127.0.0.1:{port}", [process, *process.children(recursive=True)])


def spent(found: list[psutil.Process]) -> float:
    """Processor seconds of these so far."""
    return sum(sum(process.cpu_times()[:2]) for process in found if process.is_running())


async def load(session: aiohttp.ClientSession, url: str, num_clients: int, num_tokens: int) -> int:
    """So many clients at once, each with one answer; how many tokens came."""

    async def ask(number: int) -> int:
        body = {"prompt": f"{_PROMPT}{number}", "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            return int((await answer.json())["usage"]["completion_tokens"])

    return sum(await asyncio.gather(*map(ask, range(num_clients))))


async def read_steps(session: aiohttp.ClientSession, url: str, seen: dict[str, int]) -> None:
    """Watch until cancelled; counts what comes."""
    async with session.get(f"{url}/debug/steps") as answer:
        async for line in answer.content:
            seen["bytes"] += len(line)
            if line.startswith(b"data: "):
                told = json.loads(line[6:])
                seen["steps"] += len(told["steps"])
                seen["left_out"] += told["left_out"]


async def one_round(server: Served, args: argparse.Namespace, seen: dict[str, int] | None) -> tuple[float, float]:
    """Tokens a second, and processor seconds for a thousand tokens."""
    url, found = server
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 20) as session:
        watcher = None if seen is None else asyncio.create_task(read_steps(session, url, seen))
        await asyncio.sleep(0.5)
        before, began = spent(found), time.monotonic()
        num_tokens = await load(session, url, args.clients, args.tokens)
        seconds, used = time.monotonic() - began, spent(found) - before
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
    return num_tokens / seconds, 1e3 * used / num_tokens


async def measure(args: argparse.Namespace, servers: dict[str, Served]) -> dict[str, Any]:
    """All rounds, in turns."""
    kinds = ["nobody", "watched", *(["base"] if "base" in servers else [])]
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    costs: dict[str, list[float]] = {kind: [] for kind in kinds}
    seen = {"bytes": 0, "steps": 0, "left_out": 0}
    for server in servers.values():
        await one_round(server, args, None)  # the first load finds nothing warm
    for number in range(args.rounds):
        for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
            server = servers["base" if kind == "base" else "own"]
            rate, cost = await one_round(server, args, seen if kind == "watched" else None)
            rates[kind].append(rate)
            costs[kind].append(cost)
    against = {kind: _change(rates["nobody"], rates[kind]) for kind in kinds if kind != "nobody"}
    costlier = {kind: _change(costs["nobody"], costs[kind]) for kind in kinds if kind != "nobody"}
    return {
        "tokens_per_s": {kind: round(statistics.median(found), 1) for kind, found in rates.items()},
        "cpu_s_per_1000_tokens": {kind: round(statistics.median(found), 4) for kind, found in costs.items()},
        "tokens_per_s_against_nobody_percent": against,
        "cpu_against_nobody_percent": costlier,
        "told": {name: count / args.rounds for name, count in seen.items()},
        "rounds": {"tokens_per_s": rates, "cpu_s_per_1000_tokens": costs},
    }


def _change(before: list[float], after: list[float]) -> float:
    """The median of the rounds' changes, in percent: neighbours have the machine in the same state."""
    return round(statistics.median(100 * (b / a - 1) for a, b in zip(before, after, strict=True)), 2)


def time_steps(num_rows: int, num_steps: int, *, is_watched: bool) -> tuple[float, float]:
    """Median microseconds of the scheduler, and those that a feed adds on average, for a step of decodes."""
    scheduler = make_scheduler(num_rows)
    add_requests(scheduler, num_rows, 32, 7000, "new")
    now = 100.0
    feed = Feed(scheduler, now) if is_watched else None
    encode = msgspec.msgpack.Encoder().encode
    plans: list[StepPlan] = []
    own, added = [], 0.0
    for number in range(num_steps + 32):
        while scheduler.can_schedule and (step := scheduler.schedule()) is not None:
            plans.append(step.plan)
        result = answer(plans.pop(0))
        now += STEP_SECONDS
        started = time.thread_time()
        told = scheduler.process(result)
        planned = scheduler.schedule()
        between = time.thread_time()
        if feed is not None:
            feed.returned(result, list(told.values()), scheduler, now)
            if planned is not None:
                feed.planned(planned, scheduler, now, now)
            if number % round(INTERVAL / STEP_SECONDS) == 0:
                encode(feed.take(scheduler, now, now, is_whole=number % round(3 / STEP_SECONDS) == 0))
        ended = time.thread_time()
        if planned is not None:
            plans.append(planned.plan)
        if number >= 32:
            own.append((between - started) * 1e6)
            added += (ended - between) * 1e6
    return statistics.median(own), added / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="PYTHON", help="the Python of another commit's environment")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of the servers")
    parser.add_argument("--steps", action="store_true", help="only what a feed adds to the scheduler's own steps")
    args = parser.parse_args()
    if args.steps:
        print(f"{'rows':>8} {'scheduler us':>14} {'feed us':>10} {'of a core':>10}")
        for num_rows in (1, 16, 64, 256):
            own, added = time_steps(num_rows, 4000, is_watched=True)
            print(f"{num_rows:>8} {own:>14.1f} {added:>10.2f} {added / STEP_SECONDS / 1e4:>9.2f}%")
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {"own": stack.enter_context(serving(sys.executable, folder, args.threads))}
        if args.base:
            servers["base"] = stack.enter_context(serving(args.base, folder, args.threads))
        found = asyncio.run(measure(args, servers))
    print(json.dumps({"machine": machine(), "commit": commit(), "args": vars(args)} | found, indent=2))


if __name__ == "__main__":
    main()
