"""Processes die while vectors are made beside streams: all are what they would have been."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from penstock.ipc.faults import FAULTS, ONCE
from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import Server, serving
from tests.faults.soak import only_in_soak
from tests.faults.streams import all_told, bodies, check_equal, client, spare_is_there

FLAGS = ("--served-model-name", "m", "--dtype", "float32", "--spare-worker", "--max-num-batched-tokens", "64")
FAULTS_OF_ALL = "worker.step:kill@9,worker.computed:kill@14,scheduler.planned:kill@40"
INPUTS = [
    [[random.Random(f"{i} {j}").randrange(3, 259) for _ in range(20 + 130 * i + 9 * j)] for j in range(2)]
    for i in range(8)
]


async def vectors(http: aiohttp.ClientSession, server: Server) -> list[list[float]]:
    """Of all inputs, in requests of two."""

    async def of(inputs: list[list[int]]) -> list[list[float]]:
        body: dict[str, Any] = {"model": "m", "input": inputs}
        async with http.post(f"{server.url}/v1/embeddings", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return [entry["embedding"] for entry in (await answer.json())["data"]]

    return [vector for found in await asyncio.gather(*map(of, INPUTS)) for vector in found]


def expected(checkpoint: Checkpoint, token_ids: list[int], pooling: str) -> np.ndarray:
    with torch.inference_mode():
        states = checkpoint.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1][0]
    state = states[-1] if pooling == "last" else states.mean(0)
    return torch.nn.functional.normalize(state, dim=0).numpy()


@pytest.mark.parametrize(
    ("pooling", "flags"),
    [
        ("last", ("--num-pages", "200")),  # too few for all: some are preempted
        pytest.param("mean", (), marks=only_in_soak),
        pytest.param("last", ("--tensor-parallel-size", "2", "--no-spare-worker"), marks=only_in_soak),
        pytest.param("last", ("--host-kv-gib", "0.05", "--num-pages", "120"), marks=only_in_soak),
        pytest.param("last", ("--speculative-config", '{"method": "ngram"}'), marks=only_in_soak),
        pytest.param("last", ("--data-parallel-size", "2", "--no-spare-worker"), marks=only_in_soak),
    ],
)
async def test_vectors_do_not_change(
    checkpoint: Checkpoint, tmp_path: Path, pooling: str, flags: tuple[str, ...]
) -> None:
    environment = {FAULTS: FAULTS_OF_ALL, ONCE: str(tmp_path)}
    async with (
        serving(checkpoint.folder, *FLAGS, "--pooling", pooling, *flags, **environment) as server,
        client() as http,
    ):
        if "--no-spare-worker" not in flags:
            await spare_is_there(server)
        found, streams = await asyncio.gather(vectors(http, server), all_told(http, server, bodies(8)))
        deaths = Counter(entry["child"] for entry in server.log if entry["event"] == "process exited, restarting")
        assert sum(deaths.values()) >= 3, deaths
        assert any("scheduler" in child for child in deaths)
        check_equal(streams, await all_told(http, server, bodies(8)))
        for vector, token_ids in zip(found, [each for pair in INPUTS for each in pair], strict=True):
            np.testing.assert_allclose(vector, expected(checkpoint, token_ids, pooling), atol=1e-5)
        await server.settled(http)
