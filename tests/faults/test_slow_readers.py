"""Clients that do not read hold no row and no page, harm nobody, and get every token if they read on in time."""

import asyncio
import itertools
import json
import socket
import time
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.servers import Server, serving
from tests.faults.clockwork import expected_text, expected_tokens, make_clockwork
from tests.faults.soak import only_in_soak
from tests.faults.streams import client, told
from tests.internal_fields import internal

NUM_TOKENS = 2500
NUM_STALLED, NUM_HONEST, HONEST_TOKENS = 220, 50, 400


def body(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    common = {"model": "m", "temperature": 0, "return_token_ids": True, "stream": True}
    return common | {"prompt": prompt, "max_tokens": num_tokens}


async def ask(server: Server, prompt: list[int]) -> socket.socket:
    """Ask for a stream, with little room for it, and do not read."""
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stalled.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(stalled, ("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    text = json.dumps(body(prompt, NUM_TOKENS))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(text)}"
    await loop.sock_sendall(stalled, f"{head}\r\nConnection: close\r\n\r\n{text}".encode())
    return stalled


async def read(stalled: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    received = bytearray()
    while chunk := await asyncio.get_running_loop().sock_recv(stalled, 1 << 16):
        received += chunk
    return bytes(received)


def text_of(answer: bytes) -> str:
    """The stream's text. (An event is written whole: a line that begins with data is one.)"""
    lines = [line for line in answer.split(b"\n") if line.startswith(b"data: {")]
    assert b"data: [DONE]" in answer
    return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)


async def paused(server: Server, http: aiohttp.ClientSession, num: int, seconds: float) -> dict[str, float]:
    """Wait until so many requests are paused and nothing else is under way."""
    async with asyncio.timeout(seconds):
        while True:
            metrics = await server.metrics(http)
            if metrics.get("penstock_num_requests_paused") == num and not metrics["penstock_num_requests_running"]:
                return metrics
            await asyncio.sleep(0.1)


async def test_who_reads_on_goes_on_and_who_does_not_is_closed(tmp_path: Path) -> None:
    folder = make_clockwork(tmp_path / "m")
    flags = ("--served-model-name", "m", "--num-pages", "512")
    async with serving(folder, *flags, **internal(slow_reader_timeout=5.0)) as server, client() as http:
        patient = await ask(server, [5, 6, 7])
        metrics = await paused(server, http, 1, 20)
        assert metrics["penstock_num_used_pages"] == metrics["penstock_num_requests_waiting"] == 0
        other = await told(http, server, body([9, 9], 30))
        assert other.tokens == expected_tokens([9, 9], 30)
        async with http.post(f"{server.url}/reset_prefix_cache") as response:
            assert response.status == 200  # what it had computed is lost, too
        assert text_of(await read(patient)) == expected_text([5, 6, 7], NUM_TOKENS)
        patient.close()
        gone = await ask(server, [8, 6, 7])
        started = time.monotonic()
        await paused(server, http, 1, 20)
        position = len(server.log)
        entry = await server.logged("request", 20, after=position)
        while entry.get("code") != "client_too_slow":
            position = server.log.index(entry, position) + 1
            entry = await server.logged("request", 20, after=position)
        assert time.monotonic() - started > 5
        gone.close()
        metrics = await server.settled(http)
        assert not metrics["penstock_num_requests_paused"]
        assert metrics["penstock_num_free_pages"] + metrics["penstock_num_cached_pages"] == 512


async def gaps_of(server: Server, http: aiohttp.ClientSession, prompt: list[int]) -> list[float]:
    """A reader who keeps up: the seconds between events; its tokens are checked."""
    times: list[float] = []
    found = await told(http, server, body(prompt, HONEST_TOKENS), lambda: times.append(time.monotonic()))
    assert found.tokens == expected_tokens(prompt, HONEST_TOKENS)
    return [after - before for before, after in itertools.pairwise(times)]


async def p99_gap(server: Server, http: aiohttp.ClientSession) -> float:
    found = await asyncio.gather(*(gaps_of(server, http, [3 + i, 8]) for i in range(NUM_HONEST)))
    gaps = sorted(gap for one in found for gap in one)
    return gaps[len(gaps) * 99 // 100]


@only_in_soak
async def test_a_crowd_that_does_not_read_harms_nobody(tmp_path: Path) -> None:
    folder = make_clockwork(tmp_path / "m", step_seconds=0.03)
    flags = ("--served-model-name", "m", "--num-pages", "20000", "--max-num-seqs", "300")
    async with serving(folder, *flags) as server, client() as http:
        alone = await p99_gap(server, http)
        stalled = [await ask(server, [3 + i % 90, 4 + i // 90, 7]) for i in range(NUM_STALLED)]
        await paused(server, http, NUM_STALLED, 300)
        beside = await p99_gap(server, http)
        print(f"p99 gap of {NUM_HONEST} readers: {alone * 1e3:.1f} ms, beside {NUM_STALLED} stalled {beside * 1e3:.1f}")
        assert beside <= 1.2 * alone
        for each in stalled:
            each.close()
        await server.settled(http)
