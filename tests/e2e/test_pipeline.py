"""`penstock serve` with a pipeline: the single worker's tokens, whichever stage dies."""

import asyncio
import os
from pathlib import Path

import aiohttp
import psutil
import pytest

from penstock.ipc.messages import SamplingParams
from tests.e2e.checkpoints import make_checkpoint
from tests.e2e.servers import Server, serving, stream
from tests.gpu_worker.engine_in_process import Engine

IS_LONG = bool(os.environ.get("PENSTOCK_SOAK"))
NUM_NEW = 400
PROMPTS = [[1, 50, 60 + i, 70][: 2 + i % 3] * (1 + 7 * i) for i in range(5)]
SHAPES = [(1, 2), (1, 3), (2, 2)] if IS_LONG else [(1, 2)]


def expected(folder: Path) -> list[list[int]]:
    """The tokens of one worker: greedy ones and drawn ones."""
    sampling = [SamplingParams(max_tokens=NUM_NEW, temperature=float(i % 2), seed=i) for i in range(len(PROMPTS))]
    engine = Engine(folder, cpu_kernels="native", max_model_len=1024)
    return [tokens for (tokens,) in engine.run(PROMPTS, sampling)]


async def tokens_of(server: Server, http: aiohttp.ClientSession, number: int, on_token: asyncio.Event) -> list[int]:
    """What a stream brings."""
    body = {"model": "m", "prompt": PROMPTS[number], "max_tokens": NUM_NEW, "temperature": number % 2, "seed": number}
    found: list[int] = []
    async for event in stream(
        http, f"{server.url}/v1/completions", body | {"ignore_eos": True, "return_token_ids": True}
    ):
        for choice in event["choices"]:
            found += choice.get("token_ids") or []
        if len(found) > NUM_NEW // 8:
            on_token.set()
    return found


async def cpu_seconds(server: Server, seconds: float) -> float:
    """What all workers use together in a while."""

    def used() -> float:
        children = server.children().items()
        return sum(sum(child.cpu_times()[:2]) for name, child in children if name.startswith("penstock-worker"))

    before = used()
    await asyncio.sleep(seconds)
    return used() - before


@pytest.mark.parametrize(("num_tensor", "num_stages"), SHAPES)
async def test_streams_survive_the_death_of_each_stage(tmp_path: Path, num_tensor: int, num_stages: int) -> None:
    make_checkpoint(tmp_path, num_hidden_layers=3)
    known = expected(tmp_path)
    options = ("--model", tmp_path, "--served-model-name", "m", "--device", "cpu", "--dtype", "float32",
        "--num-pages", "200", "--max-model-len", "1024", "--cpu-kernels", "native", "--tensor-parallel-size",
        str(num_tensor), "--pipeline-parallel-size", str(num_stages))  # fmt: skip
    async with serving(*options, PENSTOCK_SPARE_WORKER="true") as server, aiohttp.ClientSession() as http:
        for victim in (None, *range(0, num_stages * num_tensor, num_tensor)):
            begun = asyncio.Event()
            streams = [asyncio.create_task(tokens_of(server, http, i, begun)) for i in range(len(PROMPTS))]
            await begun.wait()
            if victim is not None:
                pid = server.children()[f"penstock-worker-{victim}"].pid
                psutil.Process(pid).kill()
            assert await asyncio.gather(*streams) == known
        await server.settled(http)
        assert await cpu_seconds(server, 1.0) < 0.5, "stages without work use no processor"
