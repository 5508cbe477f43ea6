"""Streams whose clients never read: little is computed for them, and an honest client is served beside them."""

import asyncio
import json
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.servers import Server, serving
from tests.faults.clockwork import expected_tokens, make_clockwork
from tests.faults.streams import client, told
from tests.internal_fields import internal

NUM_READERS, NUM_TOKENS, STEP_SECONDS = 300, 1900, 0.01
MAX_TOKENS_UNREAD = 250
"""Of each stream, on average."""


async def ask_and_not_read(server: Server, body: dict[str, Any]) -> socket.socket:
    asking = socket.socket()
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # what its own system takes is not ours to bound
    asking.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(asking, ("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    text = json.dumps(body)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    )
    await loop.sock_sendall(asking, f"{head}\r\n\r\n{text}".encode())
    return asking


async def all_paused(server: Server, http: aiohttp.ClientSession, num: int) -> dict[str, float]:
    async with asyncio.timeout(120):
        while True:
            metrics = await server.metrics(http)
            if metrics["penstock_num_requests_paused"] >= num:
                return metrics
            await asyncio.sleep(0.2)


async def test_an_honest_client_beside_300_that_never_read(tmp_path: Path) -> None:
    folder = make_clockwork(tmp_path / "m", step_seconds=STEP_SECONDS)
    flags = ("--served-model-name", "m", "--num-pages", "20000", "--queue-patience", "0")
    async with serving(folder, *flags, **internal(slow_reader_timeout=300.0)) as server, client() as http:
        common = {"model": "m", "temperature": 0, "ignore_eos": True, "stream": True}
        honest = common | {"prompt": [9, 9], "max_tokens": 30, "return_token_ids": True}
        began = time.monotonic()
        assert (await told(http, server, honest)).tokens == expected_tokens([9, 9], 30)
        alone = time.monotonic() - began
        with ExitStack() as silent:
            for i in range(NUM_READERS):
                body = common | {"prompt": [3 + i % 90, 4 + i // 90], "max_tokens": NUM_TOKENS}
                silent.enter_context(await ask_and_not_read(server, body))
            began = time.monotonic()
            assert (await told(http, server, honest)).tokens == expected_tokens([9, 9], 30)
            beside = time.monotonic() - began
            metrics = await all_paused(server, http, NUM_READERS)
            unread = metrics["penstock_engine_generation_tokens_total"] / NUM_READERS
            began = time.monotonic()
            assert (await told(http, server, honest)).tokens == expected_tokens([9, 9], 30)
            after = time.monotonic() - began
            print(f"{unread:.0f} tokens each; honest client: {beside:.1f} s while they began, {after:.1f} s then")
            assert unread < MAX_TOKENS_UNREAD
            assert after < 5.0 + 5 * alone
        await server.settled(http, 60)
