"""Every order in which two processes can be stopped, continued and killed, under streams that must not notice.

python -m tests.faults.orders --busy 4 --out FILE      the whole matrix, each order with what it took, as JSON
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil

from penstock.models.families.registry import TEST_MODELS_VARIABLE
from tests.e2e.servers import Server, serving, start
from tests.faults.clockwork import expected_tokens, make_clockwork
from tests.faults.streams import client, spare_is_there

NAMES = {
    "worker": "penstock-worker-0",
    "scheduler": "penstock-scheduler",
    "frontend": "penstock-frontend-0",
    "supervisor": "",
}
PROGRAMS = {"kill": ("kill",), "pause": ("stop", "continue"), "stop": ("stop",)}
DELAYS = (0.1, 0.7, 2.5)
"""Seconds between two actions, in turn. The last is longer than the heartbeat timeout; twice it is shorter than the
silence after which the supervisor replaces a process, even on a machine that is late."""

NUM_STREAMS, NUM_TOKENS, STEP_SECONDS = 6, 300, 0.01
FLAGS = (
    *("--served-model-name", "m", "--num-pages", "4096", "--spare-worker", "--shutdown-timeout", "600"),
    *("--heartbeat-timeout", "2"),
)
ENVIRONMENT = {TEST_MODELS_VARIABLE: "tests.clockwork.family"}
MAX_SECONDS = 120.0
"""For streams to end, and for the next one to be served, on a machine that does much else."""


class Order(NamedTuple):
    """What happens: (process, action), one after the other, with so many seconds between."""

    actions: tuple[tuple[str, str], ...]
    delay: float

    def __str__(self) -> str:
        return f"{', '.join(f'{action} {process}' for process, action in self.actions)} ({self.delay} s apart)"

    def does(self, process: str, action: str) -> bool:
        """Whether that is part of it."""
        return (process, action) in self.actions

    @property
    def may_break_streams(self) -> bool:
        """The process that holds the connections dies, or is stopped for good, or all processes end."""
        is_stopped = self.does("frontend", "stop") and not self.does("frontend", "continue")
        return is_stopped or self.does("frontend", "kill") or self.ends_server

    @property
    def ends_server(self) -> bool:
        """Its supervisor is killed."""
        return self.does("supervisor", "kill")


def orders() -> list[Order]:
    """All: each pair of processes, each pair of programs, each interleaving. A supervisor that is stopped goes on."""
    found: list[Order] = []
    for pair in itertools.combinations(NAMES, 2):
        for programs in itertools.product(PROGRAMS, repeat=2):
            if ("supervisor", "stop") in zip(pair, programs, strict=True):
                continue
            first, second = ([(p, act) for act in PROGRAMS[name]] for p, name in zip(pair, programs, strict=True))
            for mixed in _interleavings(first, second):
                found.append(Order(tuple(mixed), DELAYS[len(found) % len(DELAYS)]))
    return found


def _interleavings(
    first: Sequence[tuple[str, str]], second: Sequence[tuple[str, str]]
) -> Iterator[list[tuple[str, str]]]:
    for places in itertools.combinations(range(len(first) + len(second)), len(first)):
        one, other = iter(first), iter(second)
        yield [next(one if i in places else other) for i in range(len(first) + len(second))]


class Stream:
    """A stream, up to its end or to that of its connection."""

    def __init__(self, prompt: int, num_tokens: int = NUM_TOKENS) -> None:
        self.prompt, self.num_tokens = [prompt], num_tokens
        self.tokens: list[int] = []
        self.ends: list[str] = []
        self.gap = 0.0

    async def run(self, http: aiohttp.ClientSession, server: Server) -> "Stream":
        """Read it all."""
        body: dict[str, Any] = {"model": "m", "prompt": self.prompt, "max_tokens": self.num_tokens, "temperature": 0}
        body |= {"return_token_ids": True, "stream": True}
        last = time.monotonic()
        try:
            async with http.post(f"{server.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    self.ends.append((await response.json())["error"]["code"])
                    return self
                async for line in response.content:
                    if not line.startswith(b"data: "):
                        continue
                    now = time.monotonic()
                    last, self.gap = now, max(self.gap, now - last)
                    if line.startswith(b"data: [DONE]"):
                        self.ends.append("[DONE]")
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.ends.append(event["error"]["code"])
                        continue
                    for choice in event["choices"]:
                        self.tokens += choice.get("token_ids") or []
        except aiohttp.ClientError:
            self.ends.append("broken")
        return self

    @property
    def is_whole(self) -> bool:
        """It ended as if nothing had happened."""
        return self.ends == ["[DONE]"] and self.tokens == expected_tokens(self.prompt, self.num_tokens)

    @property
    def is_true(self) -> bool:
        """What came of it was right, and then it had one end."""
        expected = expected_tokens(self.prompt, self.num_tokens)[: len(self.tokens)]
        return self.tokens == expected and len(self.ends) == 1 and (self.ends != ["[DONE]"] or self.is_whole)


class Outcome(NamedTuple):
    """What an order took."""

    order: str
    ended_after: float  # seconds from the last action to the end of the last stream
    served_after: float  # to the end of a new stream, or of all processes
    gap: float  # the longest in a stream
    num_whole: int  # streams that say all that they would have said


async def play(order: Order, server: Server, http: aiohttp.ClientSession) -> Outcome:
    """Do it under streams, and hold everything against what it should be."""
    streams = [Stream(5 + i) for i in range(NUM_STREAMS)]
    running = [asyncio.create_task(stream.run(http, server)) for stream in streams]
    await asyncio.sleep(0.5)
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    stopped: dict[str, psutil.Process] = {}
    for i, (name, action) in enumerate(order.actions):
        if i:
            await asyncio.sleep(order.delay)
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):  # it is being replaced, or was meanwhile
            match action:
                case "stop":
                    stopped[name] = process = _process(server, name)
                    process.suspend()
                case "continue":
                    stopped[name].resume()
                case "kill":
                    _process(server, name).kill()
    began = time.monotonic()
    async with asyncio.timeout(MAX_SECONDS):
        await asyncio.gather(*running)
    ended_after = time.monotonic() - began
    num_whole = sum(stream.is_whole for stream in streams)
    gap = max(stream.gap for stream in streams)
    assert all(stream.is_true for stream in streams), [(s.ends, len(s.tokens)) for s in streams]
    if order.ends_server:
        if "frontend" in stopped:  # for good, perhaps: it ends when it goes on
            with contextlib.suppress(psutil.NoSuchProcess):
                stopped["frontend"].resume()
        await asyncio.to_thread(psutil.wait_procs, processes, 60)
        assert not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    else:
        assert order.may_break_streams or num_whole == NUM_STREAMS, [(s.ends, len(s.tokens)) for s in streams]
        await asyncio.wait_for(_served(server, http), MAX_SECONDS)
        await server.settled(http, 60)
    return Outcome(str(order), round(ended_after, 2), round(time.monotonic() - began, 2), round(gap, 2), num_whole)


async def _served(server: Server, http: aiohttp.ClientSession) -> None:
    for _ in range(1000):
        if (await Stream(90, 20).run(http, server)).is_whole:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("nothing is served any more")


def _process(server: Server, name: str) -> psutil.Process:
    return psutil.Process(server.process.pid) if name == "supervisor" else server.children()[NAMES[name]]


async def play_all(chosen: Sequence[Order], folder: Path) -> AsyncIterator[Outcome]:
    """One after the other on one server, as long as that lives."""
    model = make_clockwork(folder / "m", step_seconds=STEP_SECONDS)
    left = list(chosen)
    while left:
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(client())
            if left[0].ends_server:
                server = Server(await start(model, *FLAGS, **ENVIRONMENT))
                stack.push_async_callback(_end, server)
                server.url = (await server.logged("serving"))["url"]
            else:
                server = await stack.enter_async_context(serving(model, *FLAGS, **ENVIRONMENT))
            await spare_is_there(server)
            while left:
                order = left.pop(0)
                try:
                    yield await play(order, server, http)
                except BaseException as error:
                    error.add_note(str(order))
                    error.add_note("\n".join(map(str, server.log[-60:])))
                    raise
                if order.ends_server or (left and left[0].ends_server):
                    break


async def _end(server: Server) -> None:
    if server.process.returncode is None:
        for process in [*psutil.Process(server.process.pid).children(recursive=True), server.process]:
            process.kill()
    await server.ended()


@contextlib.contextmanager
def busy(num_loops: int) -> Iterator[None]:
    """Other processes that want all of the machine."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_loops)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


async def _record(num_busy: int) -> str:
    chosen = sorted(orders(), key=lambda order: order.ends_server)
    load_before = os.getloadavg()[0]
    found: list[Outcome] = []
    with busy(num_busy), tempfile.TemporaryDirectory() as folder:
        async for outcome in play_all(chosen, Path(folder)):
            found.append(outcome)
            print(len(found), outcome, flush=True)
    kept = [outcome.served_after for outcome, order in zip(found, chosen, strict=True) if not order.ends_server]
    summary = {
        "busy_loops": num_busy,
        "load_before": round(load_before, 1),
        "num_orders": len(found),
        "num_orders_whose_streams_must_be_whole": sum(not order.may_break_streams for order in chosen),
        "streams_whole": sum(outcome.num_whole for outcome in found),
        "streams_cut_short_but_true": len(found) * NUM_STREAMS - sum(outcome.num_whole for outcome in found),
        "served_after_s": {"median": statistics.median(kept), "max": max(kept)},
        "longest_gap_s": max(outcome.gap for outcome in found),
    }
    print(json.dumps(summary, indent=1))
    return json.dumps({**summary, "orders": [outcome._asdict() for outcome in found]}, indent=1) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=0, help="processes beside it that only compute")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.write_text(asyncio.run(_record(arguments.busy)))
