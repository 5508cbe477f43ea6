"""All kinds of models, transports and schedules: outputs of a prefill and a decode engine are those of one engine.

By default one model with two page groups over sockets with keys; in soak every kind with every transport.
"""

from pathlib import Path
from typing import Any

import pytest

from penstock.ipc.curve import make_key_file
from penstock.ipc.messages import SamplingParams
from tests.faults.soak import IS_SOAK
from tests.gpu_worker.checkpoints import CONFIGS, make_checkpoint, prompts
from tests.gpu_worker.engine_in_process import Engine as Alone
from tests.handover.conftest import launched
from tests.handover.engines import Engines
from tests.kernels.pairs import pairwise

PROMPTS = prompts((200, 33, 150, 16, 300, 64), seed=4)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, presence_penalty=0.2, seed=11)
WINDOWS = "qwen3-layer-types"
KINDS = (
    *pairwise(tuple(CONFIGS), ("shared_memory", "zmq"), ("native",), (0, 1, 2), (8, 16, 64), ("", "int8")),
    # torch's kernels round inputs of int8 products by whatever is computed together: one engine's chunks do already
    *pairwise(tuple(CONFIGS), ("shared_memory", "zmq"), ("torch",), (0, 1, 2), (8, 16, 64), ("",)),
)
CASES = KINDS if IS_SOAK else ((WINDOWS, "zmq", "torch", 1, 16, ""),)


@pytest.mark.parametrize(("name", "transport", "kernels", "depth", "page_size", "quantization"), CASES)
def test_outputs_do_not_depend_on_who_computes_the_prompt(
    tmp_path: Path, name: str, transport: str, kernels: str, depth: int, page_size: int, quantization: str
) -> None:
    make_checkpoint(tmp_path / "m", name)
    options: dict[str, Any] = {"pipeline_depth": depth, "page_size": page_size, "num_pages": 4800 // page_size}
    options |= {"cpu_kernels": kernels, "quantization": quantization, "max_num_batched_tokens": 50}
    alone = Alone(tmp_path / "m", **options)
    expected = [alone.run(PROMPTS, sampling, n=2) for sampling in (GREEDY, SEEDED)]
    if transport == "zmq":
        make_key_file(tmp_path / "keys")
        options |= {"channel_key_file": str(tmp_path / "keys"), "kv_transfer_address": "tcp://127.0.0.1:0"}

    async def check(engines: Engines) -> None:
        assert [await engines.run(PROMPTS, sampling, n=2) for sampling in (GREEDY, SEEDED)] == expected
        await engines.settled()
        prefill, decode = engines.engines
        assert decode.handover.num_received == prefill.handover.num_sent
        assert decode.handover.num_received_pages == prefill.handover.num_sent_pages > 0
        assert decode.handover.num_received >= 3

    with launched(tmp_path / "m", "prefill", "decode", kv_transport=transport, **options) as launch:
        launch.do(check)
