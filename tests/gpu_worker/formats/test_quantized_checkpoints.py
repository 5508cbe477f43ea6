"""Checkpoints whose matrices are quantized, all or some of them, through the loader and both kinds of kernels."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.models.blocks.travelling_experts import TravellingExperts
from penstock.gpu_worker.models.decoder import DecoderModel
from penstock.gpu_worker.models.linear import JoinedLinear, Linear
from penstock.gpu_worker.models.loading.loader import load_model, load_model_config
from penstock.gpu_worker.models.model import Model
from penstock.kernels.native.library import Library
from penstock.models.files.source import LoadError
from penstock.models.finding.registry import open_checkpoint
from tests.gpu_worker.checkpoints import attention_of, edit_config, make_checkpoint
from tests.kernels.native.native_library import load_library

BLOCK = 32


def fp8_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [N, K], and the scale of each block."""
    rows, columns = (-(-size // BLOCK) for size in matrix.shape)
    padded = functional.pad(matrix, (0, columns * BLOCK - matrix.shape[1], 0, rows * BLOCK - matrix.shape[0]))
    scales = padded.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)) / 448
    codes = matrix / spread(scales, matrix)
    return codes.to(torch.float8_e4m3fn), scales


def spread(scales: Tensor, matrix: Tensor) -> Tensor:
    each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return each[: matrix.shape[0], : matrix.shape[1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 0 is quantized, layer 1 without v, and layer 2 without up: parts of what is one matrix elsewhere."""
    folder = tmp_path_factory.mktemp("fp8")
    make_checkpoint(folder, "llama", num_hidden_layers=3)
    path = folder / "model.safetensors"
    stored = {}
    for name, tensor in load_file(path).items():
        if "_proj" in name and name not in (
            "model.layers.1.self_attn.v_proj.weight",
            "model.layers.2.mlp.up_proj.weight",
        ):
            stored[name], stored[f"{name}_scale_inv"] = fp8_blocks(tensor)
        else:
            stored[name] = tensor
    save_file(stored, path)
    edit_config(
        folder,
        quantization_config={
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head"],
        },
    )
    return folder


def load(folder: Path, library: Library | None = None) -> Model:
    return load_model(open_checkpoint(folder), load_model_config(folder), torch.float32, CpuDevice(1, library))


def plain(folder: Path, *names: str) -> Tensor:
    """These weights as floats, one above the other."""
    stored = load_file(folder / "model.safetensors")
    parts = []
    for name in names:
        weight, scales = stored[f"{name}.weight"].float(), stored.get(f"{name}.weight_scale_inv")
        parts.append(weight if scales is None else weight * spread(scales, weight))
    return torch.cat(parts)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_each_product_is_that_of_its_parts(folder: Path, layer: int) -> None:
    model = load(folder)
    assert isinstance(model, DecoderModel)
    mlp = model.layers[layer].mlp
    assert not isinstance(mlp, TravellingExperts)
    attention = attention_of(model.layers[layer])
    prefix = f"model.layers.{layer}"
    products: list[tuple[Linear, list[str]]] = [
        (attention.qkv, [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]),
        (attention.o, [f"{prefix}.self_attn.o_proj"]),
        (mlp.gate_up, [f"{prefix}.mlp.{name}_proj" for name in ("gate", "up")]),  # type: ignore[list-item, union-attr]
    ]
    for linear, names in products:
        weight = plain(folder, *names)
        x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0))
        bound = 2**-4 * (x.abs() @ weight.abs().T)  # of rounding inputs to e4m3
        assert bool(((linear(x, None) - x @ weight.T).abs() <= bound).all()), names
        joined = (layer == 1 and "q_proj" in names[0]) or (layer == 2 and "gate" in names[0])
        assert isinstance(linear, JoinedLinear) == joined


@torch.inference_mode()
def test_native_kernels_compute_the_same(folder: Path) -> None:
    """The rounding of inputs is the same, but a sum in another order may move one by a step."""
    library = load_library(1)
    hidden = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    native, by_torch = load(folder, library), load(folder)
    assert native.kernels == "native"
    torch.testing.assert_close(native.logits(hidden), by_torch.logits(hidden), rtol=1e-5, atol=1e-5)


def test_a_scale_that_is_missing_or_has_another_shape(folder: Path, tmp_path: Path) -> None:
    for name, change in (("lacks", None), ("shape", torch.ones(1, 1))):
        broken = tmp_path / name
        broken.mkdir()
        for path in folder.iterdir():
            if path.name != "model.safetensors":
                (broken / path.name).write_bytes(path.read_bytes())
        stored = load_file(folder / "model.safetensors")
        key = "model.layers.0.mlp.down_proj.weight_scale_inv"
        del stored[key]
        if change is not None:
            stored[key] = change
        save_file(stored, broken / "model.safetensors")
        with pytest.raises(LoadError, match=f"{name}.*down_proj.weight_scale_inv|down_proj.weight_scale_inv.*{name}"):
            load(broken)
