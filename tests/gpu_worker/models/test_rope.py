"""Rotary frequencies equal transformers' for every kind."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.models.loading.loader import load_model_config
from penstock.gpu_worker.models.rope import Rope, cos_sin_table, inverse_frequencies
from penstock.models.description.decoder import Decoder
from penstock.models.parsing.rope import RopeConfig
from tests.gpu_worker.checkpoints import TRAINED_LEN
from tests.gpu_worker.conftest import Checkpoint

NAMES = ["llama-linear", "llama-dynamic", "llama-llama3", "llama-yarn", "qwen2-yarn"]


def load_rope(folder: Path) -> RopeConfig:
    config = load_model_config(folder)
    assert isinstance(config, Decoder)
    rope = config.attentions[0][1].rope
    assert rope is not None
    return rope


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [10, TRAINED_LEN, TRAINED_LEN + 137])
def test_frequencies(checkpoint: Callable[..., Checkpoint], name: str, length: int) -> None:
    folder, model = checkpoint(name)
    rope = load_rope(folder)
    expected, factor = ROPE_INIT_FUNCTIONS[rope.kind](model.config, torch.device("cpu"), seq_len=length)
    torch.testing.assert_close(inverse_frequencies(rope, length), expected)
    assert rope.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("name", ["llama", *NAMES])
def test_the_table(checkpoint: Callable[..., Checkpoint], name: str) -> None:
    folder, model = checkpoint(name)
    rope = load_rope(folder)
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(300)[None])
    half = rope.dim // 2
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1)
    torch.testing.assert_close(cos_sin_table(rope, 300), expected)


def test_dynamic_scaling_is_each_row_s_own(checkpoint: Callable[..., Checkpoint]) -> None:
    config = load_rope(checkpoint("llama-dynamic")[0])
    rope = Rope(config)
    rope.prepare(CpuDevice(1), 4, 1024)
    rope.set_row(2, TRAINED_LEN + 100)
    rope.set_row(3, 50)
    positions = torch.tensor([7, 8, 7])
    none, cos_sin = rope.for_step(positions, torch.tensor([2, 3]), torch.tensor([0, 2, 3]))
    assert none is None
    for i, (position, length) in enumerate([(7, TRAINED_LEN + 100), (8, TRAINED_LEN + 100), (7, 50)]):
        angles = position * inverse_frequencies(config, length)
        torch.testing.assert_close(cos_sin[i], torch.cat((angles.cos(), angles.sin())))
    assert not torch.equal(cos_sin[0], cos_sin[2])


def test_sections_are_copied_to_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, each copy of a list waits for the steps before."""
    config = RopeConfig(kind="default", dim=8, theta=100.0, original_max_len=64, sections=(2, 1, 1))
    rope = Rope(config)
    rope.prepare(CpuDevice(1), 2, 64)
    turns = torch.tensor([[3, 4], [5, 6], [7, 8]])
    positions, rows, starts = torch.tensor([10, 11]), torch.tensor([0]), torch.tensor([0, 2])
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("a list is copied in a step"))
    angles = rope.for_step(positions, rows, starts, turns).cos_sin
    table = cos_sin_table(config, 65)
    expected = [[table[turns[section, i], j] for j, section in enumerate((0, 0, 1, 2) * 2)] for i in range(2)]
    assert angles.tolist() == [[float(x) for x in row] for row in expected]
