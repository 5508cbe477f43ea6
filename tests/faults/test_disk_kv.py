"""The disk tier of real servers: a restart, a folder in use, a worker killed while it writes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from penstock.ipc import faults
from tests.e2e.servers import Server, serving

_NUM_TOKENS = 1000
PROMPT = [(i * 7919) % 3900 + 100 for i in range(_NUM_TOKENS)]
OTHERS = [[(i * 31 + k * 977) % 3900 + 100 for i in range(700)] for k in range(1, 4)]
NUM_PAGES = _NUM_TOKENS // 16


@asynccontextmanager
async def server_on(folder: Path, **environment: str) -> AsyncIterator[tuple[Server, aiohttp.ClientSession]]:
    """A server of the demo model that has read what is in the folder."""
    disk = ("--disk-kv", f"{folder}:0.1")
    arguments = ("demo/model", "--num-pages", "400", *disk)
    async with serving(*arguments, **environment) as server, aiohttp.ClientSession() as session:
        await server.logged("disk KV listed")
        yield server, session


async def ask(server: Server, session: aiohttp.ClientSession, prompt: list[int]) -> tuple[str, int]:
    """Return the greedy text, and how many tokens of the prompt were not computed."""
    body = {"model": "demo/model", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    async with session.post(f"{server.url}/v1/completions", json=body) as response:
        told: dict[str, Any] = json.loads(await response.text())
        assert response.status == 200, told
    return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


async def written(
    server: Server, session: aiohttp.ClientSession, least: int, seconds: float = 20.0
) -> dict[str, float]:
    """Wait until nothing is left to be written; the metrics then."""
    async with asyncio.timeout(seconds):
        while True:
            await asyncio.sleep(0.3)
            metrics = await server.metrics(session)
            if metrics["penstock_disk_kv_cached_pages"] >= least and not metrics["penstock_disk_kv_pages_to_write"]:
                return metrics


async def test_a_restart(tmp_path: Path) -> None:
    async with server_on(tmp_path) as (server, session):
        expected, num_cached = await ask(server, session, PROMPT)
        assert num_cached == 0
        await written(server, session, NUM_PAGES)
    async with server_on(tmp_path) as (server, session):
        assert await ask(server, session, PROMPT) == (expected, 992)
        metrics = await server.settled(session)
        assert metrics["penstock_disk_kv_loaded_pages_total"] == 62
        assert metrics["penstock_num_free_pages"] + metrics["penstock_num_cached_pages"] == 400
        async with serving("demo/model", "--disk-kv", f"{tmp_path}:0.1") as second:
            await second.logged("disk KV: off, another worker uses the folder")
            assert await ask(second, session, PROMPT) == (expected, 0), "it goes without"


async def test_a_worker_killed_while_it_writes(tmp_path: Path) -> None:
    """Its successor reads what was written before; streams go on, and tokens are the same."""
    once = tmp_path / "once"
    once.mkdir()
    fault = {faults.FAULTS: "worker.disk:kill@40", faults.ONCE: str(once)}
    async with server_on(tmp_path / "kv", **fault) as (server, session):
        expected, _ = await ask(server, session, PROMPT)
        others = [await ask(server, session, prompt) for prompt in OTHERS]
        await server.logged("worker lost")
        assert (await ask(server, session, PROMPT))[0] == expected
        assert [(await ask(server, session, prompt))[0] for prompt in OTHERS] == [text for text, _ in others]
        await written(server, session, NUM_PAGES)
        await server.settled(session)
