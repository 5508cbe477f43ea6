"""Five times what the engine can do: refusals come quickly, whoever is admitted is served to the end, no row idles."""

import asyncio
import time
from pathlib import Path
from typing import NamedTuple

import aiohttp

from tests.e2e.servers import Server, serving
from tests.faults.clockwork import expected_tokens, make_clockwork
from tests.faults.soak import IS_SOAK, sized
from tests.faults.streams import Told, client, told

NUM_ROWS, NUM_TOKENS, SECONDS = sized((4, 10, 4), (16, 20, 30))
STEP_SECONDS = 0.05
CAPACITY = NUM_ROWS / STEP_SECONDS  # tokens a second
OVERLOAD = 5


class Answer(NamedTuple):
    told: Told
    prompt: list[int]
    seconds: float
    ended_at: float


async def ask(http: aiohttp.ClientSession, server: Server, prompt: list[int]) -> Answer:
    body = {"model": "m", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
    started = time.monotonic()
    found = await told(http, server, body)
    now = time.monotonic()
    return Answer(found, prompt, now - started, now)


async def test_five_times_the_capacity(tmp_path: Path) -> None:
    folder = make_clockwork(tmp_path / "m", step_seconds=STEP_SECONDS)
    flags = ("--max-num-seqs", str(NUM_ROWS), "--max-num-queued-seqs", str(2 * NUM_ROWS), "--num-pages", "4096")
    async with serving(folder, "--served-model-name", "m", "--queue-patience", "4", *flags) as server, client() as http:
        rate = OVERLOAD * CAPACITY / NUM_TOKENS  # requests a second
        began = time.monotonic()
        asked = []
        for i in range(int(rate * SECONDS)):
            await asyncio.sleep(max(0.0, began + i / rate - time.monotonic()))
            asked.append(asyncio.create_task(ask(http, server, [3 + i % 90, 3 + i // 90, 7])))
        found = await asyncio.gather(*asked)

        served = [answer for answer in found if answer.told.status == 200]
        refused = [answer for answer in found if answer.told.status != 200]
        for answer in served:
            assert answer.told.ends == ["length", "[DONE]"]
            assert answer.told.tokens == expected_tokens(answer.prompt, NUM_TOKENS)
        assert {(answer.told.status, *answer.told.ends) for answer in refused} == {(429, "queue_full")}
        waits = sorted(answer.seconds for answer in refused)
        goodput = len(served) * NUM_TOKENS / (max(answer.ended_at for answer in served) - began) / CAPACITY
        print(
            f"{len(found)} requests, {len(served)} served, goodput {goodput:.0%} of the capacity; "
            f"refusals: p50 {waits[len(waits) // 2] * 1e3:.1f} ms, p99 {waits[len(waits) * 99 // 100] * 1e3:.1f} ms"
        )
        assert len(refused) > len(found) // 2
        if IS_SOAK:  # on a machine that does nothing else
            assert goodput > 0.9
            assert waits[len(waits) * 99 // 100] < 0.05
        assert waits[-1] < min(answer.seconds for answer in served), "who is refused does not wait"
        await server.settled(http)


async def told_of(http: aiohttp.ClientSession, server: Server, metric: str) -> None:
    """Wait until a metric is not zero."""
    async with asyncio.timeout(60):
        while True:
            if (await server.metrics(http)).get(metric):
                return
            await asyncio.sleep(0.05)


async def test_the_answer_says_when_to_come_again_and_who_waits_too_long_goes(tmp_path: Path) -> None:
    folder = make_clockwork(tmp_path / "m", step_seconds=0.05)
    flags = ("--max-num-seqs", "1", "--max-num-queued-seqs", "1", "--queue-timeout", "5")
    async with serving(folder, "--served-model-name", "m", "--queue-patience", "4", *flags) as server, client() as http:
        url = f"{server.url}/v1/completions"
        running = asyncio.create_task(
            told(http, server, {"model": "m", "prompt": [5, 6], "ignore_eos": True, "max_tokens": 200})
        )
        await told_of(http, server, "penstock_num_requests_running")
        queued = asyncio.create_task(told(http, server, {"model": "m", "prompt": [5, 7], "max_tokens": 5}))
        await told_of(http, server, "penstock_num_requests_waiting")
        async with http.post(url, json={"model": "m", "prompt": [5], "max_tokens": 1}) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
        async with http.get(f"{server.url}/ready") as response:
            assert response.status == 503
        waited = await queued
        assert waited.ends[-1] == "deadline_exceeded"
        assert not waited.tokens
        assert (await running).ends[-1] == "[DONE]"
        await server.settled(http)
