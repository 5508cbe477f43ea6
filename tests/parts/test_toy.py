"""A part of another distribution, from its options to what clients see of it."""

import asyncio
import os
from pathlib import Path

import aiohttp

from tests.e2e.servers import serving
from tests.parts.distribution import install

ROOT = Path(__file__).parents[2]


async def test_a_part_of_another_distribution_serves(tmp_path: Path) -> None:
    path = os.pathsep.join([str(install(tmp_path)), str(ROOT), os.environ.get("PYTHONPATH", "")])
    async with (
        serving("--toy-word", "hi", PYTHONPATH=path, PENSTOCK_TOY_TIMES="2") as server,
        aiohttp.ClientSession() as session,
    ):
        said = {"words": ["hi", "hi"], "is_started": True, "max_model_len": 2048, "num_left": 0}
        async with session.get(f"{server.url}/toy") as answer:
            assert await answer.json() == said
        async with session.get(f"{server.url}/v1/models", headers={"x-toy": "1"}) as answer:
            assert await answer.json() == said
        async with session.get(f"{server.url}/nowhere", headers={"x-toy": "1"}) as answer:
            assert (answer.status, [*await answer.json()], "x-toy-id" in answer.headers) == (404, ["oops"], True)
        async with session.get(f"{server.url}/openapi.json") as answer:
            assert "/toy" in (await answer.json())["paths"]
        metrics = await server.settled(session)  # there is a report of the engine then
        assert metrics["toy_words_total"] == 4
        assert metrics["toy_rows"] == metrics["penstock_num_rows"] > 0
        body = {"model": "penstock-demo", "prompt": "One", "max_tokens": 2}
        async with session.post(f"{server.url}/v1/completions", json=body) as answer:
            assert answer.status == 200
        body |= {"toy_token": 70, "return_token_ids": True}
        async with session.post(f"{server.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            assert (await answer.json())["choices"][0]["token_ids"] == [70, 70]
        async with session.post(f"{server.url}/v1/completions", json=body | {"toy_token": -2}) as answer:
            assert (await answer.json())["error"]["param"] == "toy_token"
        async with asyncio.timeout(60):
            while await num_left(session, server.url) != 2:  # noqa: ASYNC110 - by scheduler, worker, engine
                await asyncio.sleep(0.05)


async def num_left(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(f"{url}/toy") as answer:
        said = await answer.json()
    count: int = said["num_left"]
    return count
