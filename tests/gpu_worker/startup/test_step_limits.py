"""Sizes of steps on a device: what the options leave open follows from its memory and the model."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from penstock.config.ranks import Place
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.parallel.alone import ALONE
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.gpu_worker.startup.step_limits import with_limits
from penstock.models.described import model_config_of
from penstock.models.description.model_config import ModelConfig
from penstock.models.finding.registry import open_model
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import make_config

OPEN = {"max_num_seqs": 0, "max_num_batched_tokens": 0, "page_size": 0}


def gpu(total: float, used: float = 0.0) -> Device:
    return cast(Device, SimpleNamespace(torch_device=torch.device("cuda"), memory_use=lambda: (int(used), int(total))))


def sizes(checkpoint: Any, device: Device, ranks: Ranks = ALONE, **options: Any) -> tuple[int, int, int]:
    folder, _ = cast(Checkpoint, checkpoint("llama"))
    config = make_config(folder, **(OPEN | options))
    part: ModelConfig = model_config_of(open_model(config), "auto", "", with_weights=True)
    found = with_limits(config, part, torch.float32, device, ranks).scheduler
    return found.max_num_seqs, found.max_num_batched_tokens, found.page_size


def test_they_follow_the_memory(checkpoint: Any) -> None:
    assert sizes(checkpoint, gpu(80e9)) == (256, 8192, 16)
    assert sizes(checkpoint, gpu(24e9)) == (128, 4096, 16)
    assert sizes(checkpoint, cast(Device, SimpleNamespace(torch_device=torch.device("cpu")))) == (64, 2048, 16)


def test_weights_leave_room_for_fewer_rows(checkpoint: Any) -> None:
    folder, _ = cast(Checkpoint, checkpoint("llama"))
    config = make_config(folder)
    part = model_config_of(open_model(config), "auto", "", with_weights=True)
    of_token = 2 * 4 * sum(shape.num_heads * shape.key_dim for shape in part.kv)
    used = 0.9 * 80e9 - 100 * 1024 * of_token
    assert sizes(checkpoint, gpu(80e9, used)) == (96, 8192, 16)
    assert sizes(checkpoint, gpu(80e9, 80e9)) == (64, 8192, 16)  # the pool will say what does not fit


def test_options_are_kept(checkpoint: Any) -> None:
    assert sizes(checkpoint, gpu(80e9), max_num_seqs=3, page_size=64) == (3, 8192, 64)


def test_ranks_agree(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All compute with the sizes of the one with the least memory."""
    make = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda data, device: make(data))  # there is no GPU to put it on

    class Two:
        place = Place(num_tensor=2)

        def all_gather(self, x: Tensor) -> Tensor:
            return torch.cat((x, make([int(24e9), int(20e9)])))

    assert sizes(checkpoint, gpu(80e9), cast(Ranks, Two())) == (128, 4096, 16)
