"""Convolutions of q, k and v: each by itself as published, or as the one that transformers computes with."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.gpu_worker.families.case import Case
from tests.gpu_worker.families.checkpoints import make_model
from tests.gpu_worker.families.recurrent import DELTA
from tests.gpu_worker.families.test_expert_layouts import weights_of


def test_convolutions_of_different_sizes(tmp_path: Path) -> None:
    """Two key heads of 12 numbers and four value heads of 20."""
    make_model(Case("olmo_hybrid", DELTA)).save_pretrained(tmp_path, save_original_format=False)
    joined, _ = weights_of(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name in [name for name in stored if name.endswith("conv1d.weight")]:
        parts = stored.pop(name).split((24, 24, 80))
        stored |= {
            name.replace("conv1d", f"{which}_conv1d"): part.contiguous()
            for which, part in zip("qkv", parts, strict=True)
        }
    save_file(stored, tmp_path / "model.safetensors")
    apart, _ = weights_of(tmp_path)
    assert all(torch.equal(*pair) for pair in zip(joined, apart, strict=True))
