"""The pool's budget, with a GPU whose memory is told by the test."""

from collections.abc import Callable

import pytest
import torch

from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.models.decoder import DecoderModel
from penstock.gpu_worker.models.loading.loader import dummy_model, load_model_config
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.gpu_worker.startup import memory_profile
from penstock.gpu_worker.startup.memory_profile import pool_budget, row_state_bytes
from penstock.gpu_worker.state.kv_pool import KVPool
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import make_config
from tests.gpu_worker.launched.fake_cuda import use_fake_cuda

TOTAL, IN_USE, BEFORE, PEAK = 1000 << 20, 300 << 20, 50 << 20, 90 << 20


@pytest.mark.parametrize("eager", [False, True])
def test_what_is_left_for_pages(
    checkpoint: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    folder, _ = checkpoint("llama")
    model_config = load_model_config(folder)
    model = dummy_model(model_config, torch.float32, CpuDevice(1))
    assert isinstance(model, DecoderModel)
    launched: list[int] = []
    forward = model.forward

    def noted(inputs: ForwardInputs, kv: KVPool) -> torch.Tensor:
        launched.append(inputs.input_ids.shape[0])
        return forward(inputs, kv)

    monkeypatch.setattr(model, "forward", noted)
    device = use_fake_cuda(monkeypatch)
    for name, value in {
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "mem_get_info": (TOTAL - IN_USE, TOTAL),
        "memory_reserved": BEFORE,
        "max_memory_reserved": PEAK,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(memory_profile, "MOST_GRAPH_TOKENS", 8)
    config = make_config(
        folder, max_num_seqs=3, max_num_batched_tokens=11, gpu_memory_utilization=0.9, enforce_eager=eager
    )
    with torch.inference_mode():
        budget = pool_budget(config, model, torch.float32, torch.float32, device)
    assert launched == ([11] if eager else [11, 8])
    rows = row_state_bytes(config, model_config)
    assert rows > 4 * (4 * 513 + 513 * 16)
    left = int(0.9 * TOTAL) - IN_USE - (1 if eager else 2) * (PEAK - BEFORE) - rows
    assert budget == (left, PEAK - BEFORE)
