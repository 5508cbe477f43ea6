"""Scales of keys and values that a checkpoint brings: KV gets their type, and is divided by them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config.options import ConfigError
from penstock.gpu_worker.models.loading.loader import load_model_config
from penstock.ipc.messages import SamplingParams
from penstock.models.kv_formats import kv_format_of
from tests.gpu_worker.checkpoints import edit_config, make_checkpoint
from tests.gpu_worker.engine_in_process import Engine

FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
INT8 = {**FP8, "type": "int"}
SCALES = {"k": 0.0625, "v": 0.03125}
PROMPT = [5, 9, 2, 7, 11]


def folder_with(tmp_path: Path, scheme: Any, names: str = "{attention}.{which}_scale") -> Path:
    """A checkpoint of floats but for its scales of KV."""
    make_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    for layer in range(2):
        for which, scale in SCALES.items():
            name = names.format(attention=f"model.layers.{layer}.self_attn", which=which)
            stored[name] = torch.tensor([scale * (1 + layer)])
    save_file(stored, path)
    config = {"quant_method": "compressed-tensors", "format": "naive-quantized", "config_groups": {}}
    edit_config(tmp_path, quantization_config={**config, "kv_cache_scheme": scheme})
    return tmp_path


def scales_in_pages(engine: Engine) -> list[tuple[set[float], set[float]]]:
    """Of each layer's keys and values, all that were written."""
    engine.run([PROMPT], SamplingParams(max_tokens=4, temperature=0.0))
    kv = engine.runner._kv
    found = []
    for layer in range(2):
        pages = kv.layers[layer]
        assert pages.layout is not None
        both = [pages.layout.scales(its).unique().tolist() for its in (pages.keys, pages.values)]
        found.append((set(both[0]) - {0.0}, set(both[1]) - {0.0}))
    return found


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize(
    ("scheme", "names"),
    [
        (FP8, "{attention}.{which}_scale"),
        (INT8, "{attention}.{which}_proj.output_scale"),
        ("static", "{attention}.{which}_scale"),
    ],
)
def test_pages_have_the_scales_of_the_checkpoint(tmp_path: Path, scheme: Any, names: str, kernels: str) -> None:
    folder = folder_with(tmp_path, scheme, names)
    wanted = [({SCALES["k"] * by}, {SCALES["v"] * by}) for by in (1, 2)]
    assert scales_in_pages(Engine(folder, cpu_kernels=kernels)) == wanted
    other = "fp8_e4m3" if scheme is INT8 else "int8"
    assert scales_in_pages(Engine(folder, cpu_kernels=kernels, kv_cache_dtype=other)) != wanted


def test_kv_has_the_type_of_the_scales_unless_another_is_asked_for(tmp_path: Path) -> None:
    config = load_model_config(folder_with(tmp_path, FP8))
    assert (kv_format_of("auto", config), kv_format_of("int4", config)) == ("fp8_e4m3", "int4")
    edit_config(tmp_path, quantization_config=None)
    assert kv_format_of("auto", load_model_config(tmp_path)) is None


def test_other_schemes_are_refused_or_left(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {**FP8, "num_bits": 4})
    with pytest.raises(ConfigError, match="KV in float of 4 bits"):
        load_model_config(folder)
    dynamic = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {**FP8, "dynamic": True}}
    edit_config(folder, quantization_config=dynamic)
    assert load_model_config(folder).kv_scales is None
