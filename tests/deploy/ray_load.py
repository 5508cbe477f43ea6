"""Streams through Ray Serve while engines come, die and go: `python -m tests.deploy.ray_load --out FILE`.

A cluster of two raylets on this machine, each with room for one engine. `--streams` clients ask for one stream after
the other, all greedy, and compare every text with what was answered before anything happened:

    up     so many clients that a second engine is started
    kill   the first engine's processes are killed; Serve starts another one in its place (not waited for if --quick)
    down   few clients, until one of the engines has ended with its streams moved to the other (with --quick, until the
           one that was to replace the killed one is wanted no more)

A part ends when all streams have ended that were open once its event had happened. The report, in JSON, counts streams,
failures and changed texts, and has the longest pause within a stream of each part.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ |= {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # else an engine hardly starts where others keep the processors busy
}

import aiohttp
import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

from penstock.deploy.ray import app

QUESTIONS = ("What is a KV cache?", "What is paged attention?", "Hello", "What is a token?")
LIMIT = 180.0  # seconds for an engine to come or go, and for one stream: a machine may be slow
NUM_FEW = 6  # clients, for one engine
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",  # a row's sums are the same in every batch
    "num_threads": 1,
    "max_num_seqs": 24,
    "cpu_kv_cache_gib": 0.1,
    "queue_patience": 0.0,
    "shutdown_timeout": 20.0,
    "max_engines": 2,
    "target_waiting_tokens": 64,
    "upscale_delay": 0.0,
    "downscale_delay": 1.0,
}


class Load:
    """Clients, and what they saw."""

    def __init__(self, url: str, num_tokens: int) -> None:
        self._url = url
        self._num_tokens = num_tokens
        self._expected: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.pauses: dict[str, float] = {}
        self.failures: list[str] = []
        self.num_wanted = 0
        self._open: dict[int, asyncio.Event] = {}  # the streams that have not ended, by their clients
        self.began: dict[str, float] = {}  # each part, in seconds
        self._at = time.monotonic()
        self.begin("warm")

    def begin(self, part: str) -> None:
        """From now on it is this part."""
        self.part, self.began[part] = part, round(time.monotonic() - self._at, 1)

    async def ask(self, session: aiohttp.ClientSession, question: str) -> str:
        """The text of one stream; what is wrong with it raises."""
        body = {
            "messages": [{"role": "user", "content": question}],
            "stream": True, "temperature": 0, "max_tokens": self._num_tokens, "ignore_eos": True,
        }  # fmt: skip
        pieces, is_done = [], False
        async with session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, (response.status, await response.text())
            last = 0.0  # when text came
            async for line in response.content:
                data = line.decode().strip().removeprefix("data: ")
                is_done |= data == "[DONE]"
                if data.startswith("{"):
                    event = json.loads(data)
                    assert "error" not in event, event
                    pieces += [choice["delta"].get("content", "") for choice in event["choices"]]
                    now = time.monotonic()
                    if last and pieces[-1]:
                        self.pauses[self.part] = max(self.pauses.get(self.part, 0.0), now - last)
                    last = now if pieces[-1] else last
        assert is_done, "the stream broke off"
        return "".join(pieces)

    async def learn(self, session: aiohttp.ClientSession) -> None:
        """What is answered while nothing happens."""
        self._expected = {question: await self.ask(session, question) for question in QUESTIONS}

    async def client(self, session: aiohttp.ClientSession, number: int) -> None:
        """Ask as long as so many clients are wanted."""
        while number < self.num_wanted:
            question = QUESTIONS[number % len(QUESTIONS)]
            ended = self._open[number] = asyncio.Event()
            try:
                text = await self.ask(session, question)
                self.counts[f"{self.part} streams"] += 1
                self.counts["changed"] += text != self._expected[question]
            except Exception as error:
                self.counts["failed"] += 1
                self.failures.append(f"{self.part}: {error!r}"[:500])
            finally:
                ended.set()
                del self._open[number]

    async def open_streams(self) -> None:
        """Wait until those have ended that are open now."""
        for ended in list(self._open.values()):
            await ended.wait()


def replicas() -> dict[str, int]:
    """The processes of engines that are running: their pids by their replicas' ids."""
    found = serve.status().applications["penstock"].deployments["Engine"]
    return dict(found.replica_states)


def engine_pids() -> list[int]:
    """The replicas' own processes, oldest first."""
    found = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        if "ServeReplica:penstock:Engine" in " ".join(process.info["cmdline"] or ()):
            found.append((process.info["create_time"], process.pid))
    return [pid for _, pid in sorted(found)]


def kill_tree(pid: int) -> None:
    """As when a machine goes away."""
    parent = psutil.Process(pid)
    for process in [parent, *parent.children(recursive=True)]:
        with suppress(psutil.Error, ProcessLookupError):  # its child may have just ended by itself
            os.kill(process.pid, signal.SIGKILL)


async def until_running(count: int) -> None:
    """Wait until so many engines are running, and none comes or goes."""
    async with asyncio.timeout(LIMIT):
        while True:
            states = {str(state): number for state, number in replicas().items() if number}
            if states == {"RUNNING": count} and len(engine_pids()) == count:
                return
            await asyncio.sleep(0.2)


async def run(url: str, num_streams: int, num_tokens: int, seconds: float, *, is_quick: bool) -> Load:
    """All parts, each with at least `seconds` of load after its event."""
    load = Load(url, num_tokens)
    timeout, connector = aiohttp.ClientTimeout(total=LIMIT), aiohttp.TCPConnector(limit=0)

    async def go_on() -> None:
        await asyncio.sleep(seconds)
        await load.open_streams()

    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await load.learn(session)
        load.num_wanted = num_streams
        async with asyncio.TaskGroup() as clients:
            for number in range(num_streams):
                clients.create_task(load.client(session, number))
            load.begin("up")
            await until_running(2)
            await go_on()
            load.begin("kill")
            kill_tree(engine_pids()[0])
            await go_on()
            if not is_quick:
                await until_running(2)
                await go_on()
            load.begin("down")
            load.num_wanted = NUM_FEW
            await until_running(1)
            await go_on()
            load.num_wanted = 0
    load.begin("end")
    return load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--port", type=int, default=8124)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    began = time.monotonic()
    node = {"num_cpus": 2, "object_store_memory": 80_000_000}
    cluster = Cluster(
        initialize_head=True,
        connect=True,
        head_node_args=node | {"include_dashboard": False, "resources": {"engine": 1}},
    )
    try:
        cluster.add_node(**node, resources={"engine": 1})
        print("cluster", round(time.monotonic() - began, 1), flush=True)
        serve.start(http_options={"host": "127.0.0.1", "port": given.port})
        application = app(OPTIONS | {"cpus_per_engine": 1.0})
        serve.run(application, name="penstock", route_prefix="/")
        print("serving", round(time.monotonic() - began, 1), flush=True)
        url = f"http://127.0.0.1:{given.port}"
        load = asyncio.run(run(url, given.streams, given.tokens, given.seconds, is_quick=given.quick))
        report: dict[str, Any] = {"streams": given.streams, "few": NUM_FEW}
        report |= {"counts": load.counts, "began": load.began, "pauses": load.pauses, "failures": load.failures[:20]}
        report["seconds"] = round(time.monotonic() - began, 1)
        given.out.write_text(json.dumps(report, indent=2))
        print(json.dumps(report, indent=2), flush=True)
    finally:
        with suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
