"""Starts `penstock serve` as a user would, and watches what it says."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.internal_fields import command as command_for

START_SECONDS = 200.0  # a loaded two-core machine imports torch slowly


class Server:
    """A running `penstock serve`: its address, its log lines, its processes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[dict[str, Any]] = []
        self.url = ""
        self._log_grew = asyncio.Event()
        self._reader = asyncio.create_task(self._read_log())

    async def _read_log(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            try:
                entry = json.loads(line)
            except ValueError:
                entry = {"event": line.decode(errors="replace").rstrip()}
            self.log.append(entry)
            self._log_grew.set()
        self._log_grew.set()

    async def logged(
        self, event: str, seconds: float = START_SECONDS, after: int = 0, process: str = ""
    ) -> dict[str, Any]:
        """The first log entry of this event (of this process) from position `after` on.

        Fails if the server ends without it.
        """
        async with asyncio.timeout(seconds):
            while True:
                for entry in self.log[after:]:
                    if entry["event"] == event and process in ("", entry.get("process")):
                        return entry
                assert not self._reader.done(), f"the server ended: {self.log}"
                self._log_grew.clear()
                await self._log_grew.wait()

    async def ended(self) -> int:
        """Wait for the end of the process and of its log; the exit code."""
        code = await self.process.wait()
        await self._reader
        return code

    def children(self) -> dict[str, psutil.Process]:
        """The processes below the supervisor, by the names that they gave themselves."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                found.update(dict.fromkeys(child.cmdline()[:1], child))
        return found

    async def metrics(self, session: aiohttp.ClientSession) -> dict[str, float]:
        """All samples of /metrics without labels; those of several engines as their sums."""
        async with session.get(f"{self.url}/metrics") as response:
            text = await response.text()
        found = dict[str, float]()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.labels.keys() <= {"engine"}:
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    async def labelled(self, session: aiohttp.ClientSession, name: str) -> list[tuple[dict[str, str], float]]:
        """The samples of one metric, with their labels."""
        async with session.get(f"{self.url}/metrics") as response:
            text = await response.text()
        families = text_string_to_metric_families(text)
        return [(each.labels, each.value) for family in families for each in family.samples if each.name == name]

    async def settled(self, session: aiohttp.ClientSession, seconds: float = 60.0) -> dict[str, float]:
        """Wait until no row and no page is in use and nothing waits, as /metrics says; the metrics then."""
        busy = ("penstock_num_requests_running", "penstock_num_requests_waiting", "penstock_num_used_pages")
        async with asyncio.timeout(seconds):
            while True:
                await asyncio.sleep(0.3)  # the scheduler tells its counters at most every 0.2 seconds
                metrics = await self.metrics(session)
                if not any(metrics.get(name, 1) for name in busy):
                    return metrics


@contextlib.asynccontextmanager
async def serving(*arguments: str | Path, **environment: str) -> AsyncIterator[Server]:
    """`penstock serve ARGUMENTS --port 0`, ready for requests; ended with SIGTERM, exit code checked."""
    process = await start(*arguments, **environment)
    server = Server(process)
    try:
        server.url = (await server.logged("serving"))["url"]
        yield server
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await server.ended() == 0, server.log
    finally:
        if process.returncode is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            await server.ended()


async def start(*arguments: str | Path, **environment: str) -> asyncio.subprocess.Process:
    """Start `penstock serve` without waiting for anything."""
    # One thread: OpenMP barriers between threads cost more than these models, the more so beside other tests.
    flags = ("--port", "0", "--num-threads", "1")
    command = [*command_for(environment), "serve", *map(str, arguments), *flags]
    # Where no worker is to die, a spare one would only take time from other tests.
    settings = {"PENSTOCK_LOG_FORMAT": "json", "PENSTOCK_SPARE_WORKER": "false"}
    settings["PENSTOCK_QUEUE_PATIENCE"] = "0"  # a busy machine refuses nobody
    return await asyncio.create_subprocess_exec(
        *command, stderr=asyncio.subprocess.PIPE, env=os.environ | settings | environment
    )


async def stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """POST with `stream: true`; the parsed SSE events, which must end with [DONE]."""
    async with session.post(url, json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        is_done = False
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                is_done = True
            elif line.startswith(b"data: "):
                yield json.loads(line[6:])
        assert is_done
