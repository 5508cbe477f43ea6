"""Quantized checkpoints behind a server: streams say the same if the worker dies in the middle of them."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.e2e.checkpoints import make_checkpoint
from tests.e2e.servers import serving
from tests.e2e.test_failover import FLAGS, bodies, told
from tests.gpu_worker.families.schedules import IS_LONG
from tests.gpu_worker.formats import writers
from tests.gpu_worker.formats.writers import Writer

INT8 = {"num_bits": 8, "type": "int"}
FORMATS: dict[str, Callable[[], Writer]] = {
    "w8a8": lambda: writers.compressed(
        "int-quantized", {**INT8, "strategy": "channel"}, {**INT8, "strategy": "token", "dynamic": True}
    ),
    "gptq": lambda: writers.gptq(4, 32, has_order=True),
    "awq": lambda: writers.awq(32),
    "fp8": lambda: writers.fp8(32),
    "nf4": writers.nf4,
}


@pytest.mark.parametrize("name", list(FORMATS) if IS_LONG else ["w8a8"])
async def test_streams_go_on_after_the_worker_was_killed(tmp_path: Path, name: str) -> None:
    folder, writer, stored = tmp_path / "checkpoint", FORMATS[name](), dict[str, Tensor]()
    make_checkpoint(folder)
    for key, tensor in load_file(folder / "model.safetensors").items():
        stored |= writer.write(key, tensor)[0] if writer.quantizes(key) else {key: tensor}
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": writer.config}))
    asked = bodies(dict.fromkeys(range(4), "never"))[:4]
    async with serving(folder, *FLAGS) as server, aiohttp.ClientSession() as http:
        expected = await asyncio.gather(*(told(http, server, body) for body in asked))
        begun = asyncio.Event()
        running = asyncio.gather(*(told(http, server, body, begun) for body in asked))
        await begun.wait()
        assert not running.done()
        server.children()["penstock-worker-0"].kill()
        assert await asyncio.wait_for(running, 60) == expected
        await server.settled(http)
