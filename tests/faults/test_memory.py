"""A worker that runs out of memory: the next one takes steps of half the size, and no request is lost."""

import resource
from pathlib import Path

import pytest

from penstock.kernels.native.build import BuildError, build
from tests.e2e.checkpoints import greedy, make_checkpoint
from tests.e2e.servers import serving
from tests.faults.streams import client

_LEFT = 24 << 20
"""Bytes of address space that the worker may still take; a step of 4,000 tokens wants 70 MB for its activations."""


async def test_steps_become_smaller_when_a_worker_has_no_memory(tmp_path: Path) -> None:
    try:
        build()
    except BuildError as error:
        pytest.skip(str(error))
    folder = tmp_path / "m"
    model = make_checkpoint(folder, intermediate_size=2048, num_hidden_layers=1)
    flags = (
        "--cpu-kernels",
        "native",
        "--max-num-batched-tokens",
        "4096",
        "--num-pages",
        "512",
        "--served-model-name",
        "m",
    )
    async with serving(folder, *flags) as server, client() as http:
        worker = server.children()["penstock-worker-0"]
        used = worker.memory_info().vms
        resource.prlimit(worker.pid, resource.RLIMIT_AS, (used + _LEFT, resource.RLIM_INFINITY))
        prompts = [[3 + i] * 1000 for i in range(4)]
        body = {"model": "m", "prompt": prompts, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        async with http.post(f"{server.url}/v1/completions", json=body | {"return_token_ids": True}) as response:
            answer = await response.json()
            assert response.status == 200, answer
        assert [choice["token_ids"] for choice in answer["choices"]] == [greedy(model, ids, 3) for ids in prompts]
        failed = await server.logged("worker failed")
        assert failed["reason"].startswith("out of memory during a step")
        smaller = await server.logged("step size reduced")
        assert smaller["tokens"] <= 2048
