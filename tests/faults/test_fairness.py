"""One client's request of thousands of sequences does not keep another client from a first token."""

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.servers import Server, serving
from tests.faults.clockwork import expected_tokens, make_clockwork
from tests.faults.streams import client, told

STEP_SECONDS = 0.02
NUM_PROMPTS, N, NUM_TOKENS = 64, 60, 200


async def has_rows(server: Server, http: aiohttp.ClientSession, num: int) -> None:
    """Wait until so many sequences run."""
    async with asyncio.timeout(60):
        while True:
            if (await server.metrics(http)).get("penstock_num_requests_running", 0) >= num:
                return
            await asyncio.sleep(0.05)


def note_time(events: list[float]) -> None:
    events.append(time.monotonic())


@pytest.mark.parametrize("num_tokens", [NUM_TOKENS, 3000])
async def test_a_light_client_beside_a_heavy_one(tmp_path: Path, num_tokens: int) -> None:
    folder = make_clockwork(tmp_path / "m", step_seconds=STEP_SECONDS)
    flags = ("--max-num-seqs", "16", "--num-pages", "20000", "--max-request-seqs", "4096", "--max-prefill-ms", "0")
    async with serving(folder, "--served-model-name", "m", *flags) as server, client() as http:
        common: dict[str, Any] = {"model": "m", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        prompts = [[3 + i % 90, 5, 7] for i in range(NUM_PROMPTS)]
        heavy = asyncio.create_task(
            told(http, server, common | {"prompt": prompts, "n": N, "max_tokens": num_tokens, "stream": True})
        )
        await has_rows(server, http, 16)
        waits = []
        for i in range(5):
            prompt, started, events = [3 + i, 9, 9], time.monotonic(), list[float]()
            body = common | {"prompt": prompt, "max_tokens": 10}
            found = await told(http, server, body, partial(note_time, events))
            assert found.tokens == expected_tokens(prompt, 10)
            waits.append(events[0] - started)
        print(f"seconds to the first event beside 3,840 sequences of {num_tokens} tokens: {waits}")
        assert max(waits) < 20.0  # some steps; without turns it is minutes
        assert not heavy.done()
        heavy.cancel()
        await asyncio.gather(heavy, return_exceptions=True)
        await server.settled(http, 60)
