"""Many streams on one frontend, crowds that leave at once, a pool too small for all: every page comes back."""

import asyncio
import json
import random
import socket
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from tests.e2e.servers import Server, serving
from tests.faults.clockwork import expected_text, expected_tokens, make_clockwork
from tests.faults.soak import sized
from tests.faults.streams import client, told

NUM_STREAMS, NUM_STORMS = sized(300, 1000), sized(2, 20)
FLAGS = ("--served-model-name", "m", "--max-num-seqs", "1000", "--num-pages", "20000")
PAGES_BACK_SECONDS = 2.0


class Served(NamedTuple):
    server: Server
    http: aiohttp.ClientSession


@pytest.fixture
async def crowded(tmp_path: Path) -> AsyncIterator[Served]:
    """Room for a thousand streams at twenty tokens a second each."""
    folder = make_clockwork(tmp_path / "m", step_seconds=0.05)
    async with serving(folder, *FLAGS) as server, client() as http:
        yield Served(server, http)


def body(prompt: list[int], num_tokens: int, **fields: Any) -> dict[str, Any]:
    common = {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    return common | {"return_token_ids": True} | fields


async def canary(served: Served) -> None:
    prompt = list(range(5, 45))
    found = await told(served.http, served.server, body(prompt, 12))
    assert found.text == expected_text(prompt, 12)
    assert found.ends == ["length", "[DONE]"]


async def test_all_of_a_crowd_s_streams_end_properly(crowded: Served) -> None:
    prompts = [[3 + i % 90, 3 + i // 90, 7] for i in range(NUM_STREAMS)]
    found = await asyncio.gather(*(told(crowded.http, crowded.server, body(prompt, 24)) for prompt in prompts))
    for prompt, one in zip(prompts, found, strict=True):
        assert one.ends == ["length", "[DONE]"]
        assert one.tokens == expected_tokens(prompt, 24)
    gaps = sorted(one.gap for one in found)
    print(f"{NUM_STREAMS} streams: gap p50 {gaps[len(gaps) // 2]:.2f} s, most {gaps[-1]:.2f} s")
    await crowded.server.settled(crowded.http)


async def begin(server: Server, prompt: list[int]) -> asyncio.StreamWriter:
    """Start a stream and read its first token; the socket is left open."""
    port = int(server.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    text = json.dumps(body(prompt, 2000, stream=True))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(text)}"
    writer.write(f"{head}\r\n\r\n{text}".encode())
    await reader.readuntil(b"data: ")
    return writer


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset in place of a proper end."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


async def test_storms_of_disconnects_leave_nothing_behind(crowded: Served) -> None:
    server, http = crowded
    frontend = server.children()["penstock-frontend-0"]
    await canary(crowded)
    descriptors = frontend.num_fds()
    for _ in range(NUM_STORMS):
        writers = await asyncio.gather(*(begin(server, [3 + i % 90, 9, 9]) for i in range(NUM_STREAMS)))
        left = time.monotonic()
        for writer in writers:
            reset(writer)
        metrics = await server.settled(http, sized(10 * PAGES_BACK_SECONDS, PAGES_BACK_SECONDS))
        print(f"{NUM_STREAMS} clients left: pages back after {time.monotonic() - left:.2f} s")
        pages = (metrics["penstock_num_free_pages"], metrics["penstock_num_cached_pages"])
        assert sum(pages) == metrics["penstock_num_pages"]
        assert metrics["penstock_num_requests_in_frontend"] == 1  # the one that asks
    await canary(crowded)
    assert frontend.num_fds() <= descriptors + 4


async def test_aborts_at_any_moment_leave_nothing_behind(tmp_path: Path) -> None:
    """Queued, tokenized, compiled, in chunked prefill, in decode, at the end, half of n, twice."""
    rng = random.Random(7)
    folder = make_clockwork(tmp_path / "m", step_seconds=0.002)
    flags = ("--max-num-seqs", "24", "--num-pages", "400", "--max-num-batched-tokens", "48", "--page-size", "4")
    async with serving(folder, "--served-model-name", "m", *flags) as server, client() as http:
        served = Served(server, http)
        shared = [5 + i % 80 for i in range(150)]

        async def one() -> None:
            kind: dict[str, Any] = rng.choice(
                [
                    {"prompt": shared[: rng.randrange(1, 150)]},
                    {"prompt": [rng.randrange(3, 99) for _ in range(rng.randrange(1, 150))]},
                    {"prompt": shared[:30], "n": 5},
                    {"prompt": "free text, to be tokenized " * rng.randrange(1, 9)},
                    {"prompt": [8], "structured_outputs": {"regex": f"[a-z]{{{rng.randrange(1, 99)}}}"}},
                    {"prompt": [9], "max_tokens": 1},
                ]
            )
            request = body([], rng.choice([1, 5, 60])) | kind | {"stream": rng.random() < 0.7}
            asked = asyncio.create_task(http.post(f"{server.url}/v1/completions", json=request))
            await asyncio.sleep(rng.random() * rng.choice([0.01, 0.1, 0.5]))
            if not asked.done():
                asked.cancel()
            else:
                asked.result().close()
                asked.result().close()

        for _ in range(sized(2, 40)):
            await asyncio.gather(*(one() for _ in range(60)))
            await canary(served)
        metrics = await server.settled(http)
        assert metrics["penstock_num_requests_in_frontend"] == 1  # the one that asks
        assert metrics["penstock_num_free_pages"] + metrics["penstock_num_cached_pages"] == 400


async def test_a_pool_for_one_and_a_half_serves_them_all(tmp_path: Path) -> None:
    """64 pages, 24 sequences that need 40 each: all finish as if alone, and none is preempted again and again."""
    folder = make_clockwork(tmp_path / "m")
    flags = ("--num-pages", "64", "--page-size", "4", "--max-num-seqs", "24", "--max-num-batched-tokens", "64")
    async with serving(folder, "--served-model-name", "m", *flags) as server, client() as http:
        prompts = [[3 + i] * 20 for i in range(24)]
        found = await asyncio.gather(*(told(http, server, body(prompt, 140)) for prompt in prompts))
        for prompt, one in zip(prompts, found, strict=True):
            assert one.tokens == expected_tokens(prompt, 140)
            assert one.ends == ["length", "[DONE]"]
        too_long = await told(http, server, body([5] * 257, 1))
        assert too_long.status == 400
        metrics = await server.settled(http)
        print(f"preemptions of 24 sequences: {metrics['penstock_num_preemptions_total']:.0f}")
        assert metrics["penstock_num_preemptions_total"] <= 4 * 24
        assert metrics["penstock_num_free_pages"] + metrics["penstock_num_cached_pages"] == 64
