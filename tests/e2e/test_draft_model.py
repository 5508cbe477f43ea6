"""A server with a draft model: the same streams, also when a worker dies, and when two ranks guess."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.checkpoints import make_checkpoint
from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import Server, serving, start, stream
from tests.faults.soak import IS_SOAK
from tests.internal_fields import internal

FLAGS = ("--served-model-name", "m", "--dtype", "float32", "--num-pages", "300")
BODIES: list[dict[str, Any]] = [
    {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 120},
    {"prompt": [9, 8, 7, 6] * 20, "temperature": 0.8, "top_p": 0.9, "seed": 3, "max_tokens": 120},
    {"prompt": [5, 6, 7], "temperature": 0.7, "seed": 4, "max_tokens": 80, "logprobs": 1},
]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    make_checkpoint(folder, num_hidden_layers=1)
    return folder


def with_draft(folder: Path, **keys: Any) -> tuple[str, str]:
    return "--speculative-config", json.dumps({"method": "draft_model", "model": str(folder)} | keys)


async def text(http: aiohttp.ClientSession, server: Server, body: dict[str, Any], begun: asyncio.Event) -> str:
    told = ""
    async for event in stream(http, f"{server.url}/v1/completions", {"model": "m", "ignore_eos": True} | body):
        told += event["choices"][0]["text"] if event["choices"] else ""
        begun.set()
    return told


async def texts(http: aiohttp.ClientSession, server: Server, begun: asyncio.Event, **more: Any) -> list[str]:
    return list(await asyncio.gather(*[text(http, server, body | more, begun) for body in BODIES]))


async def test_streams_are_the_same_and_survive_a_worker(checkpoint: Checkpoint) -> None:
    begun = asyncio.Event()
    async with (
        serving(checkpoint.folder, *FLAGS, *with_draft(checkpoint.folder)) as server,
        aiohttp.ClientSession() as http,
    ):
        expected = await texts(http, server, asyncio.Event(), speculative=False)
        assert await texts(http, server, asyncio.Event()) == expected
        await server.settled(http)
        [(labels, count)] = await server.labelled(http, "penstock_draft_guessed_tokens_total")
        assert labels["drafter"] == "draft_model"
        assert count > 5
        running = asyncio.create_task(texts(http, server, begun))
        await begun.wait()
        position = len(server.log)
        server.children()["penstock-worker-0"].kill()
        await server.logged("worker connected", after=position)
        assert await asyncio.wait_for(running, 60) == expected


@pytest.mark.skipif(not IS_SOAK, reason="another server of three processes: make soak")
async def test_two_ranks_guess_the_same(checkpoint: Checkpoint, draft: Path) -> None:
    flags = (*FLAGS, "--tensor-parallel-size", "2", *with_draft(draft))
    async with (
        serving(checkpoint.folder, *flags, **internal(check_ranks=True)) as server,
        aiohttp.ClientSession() as http,
    ):
        expected = await texts(http, server, asyncio.Event(), speculative=False)
        assert await texts(http, server, asyncio.Event()) == expected


async def test_another_vocabulary_is_refused_before_anything_starts(checkpoint: Checkpoint, draft: Path) -> None:
    path = draft / "tokenizer.json"
    path.write_text(path.read_text().replace('"a"', '"aa"'))
    server = Server(await start(checkpoint.folder, *FLAGS, *with_draft(draft)))
    assert await server.ended() != 0
    said = " ".join(str(entry) for entry in server.log)
    assert "a draft model must have the same tokens" in said
    assert not [entry for entry in server.log if entry["event"] == "loading"]
