"""Matrices that the library compressed-tensors compresses, as its own function decompresses them."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from penstock.gpu_worker.formats.registry import decode
from penstock.kernels.quantized.weight import InputRounding, QuantizedWeight, dequantized
from penstock.models.formats.compressed_tensors import COMPRESSED_TENSORS_METHOD
from penstock.models.parsing.json_fields import JsonFields
from tests.gpu_worker.formats.stored import stored_parts

N, K = 48, 96
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP8 = {"num_bits": 8, "type": "float"}
CASES: dict[str, tuple[str, dict[str, object], dict[str, object] | None]] = {
    **{
        f"packed, {bits} bits{', asymmetric' * (not symmetric)}": (
            "pack-quantized",
            {"num_bits": bits, "strategy": "group", "group_size": 32, "symmetric": symmetric},
            None,
        )
        for bits in (2, 3, 4, 5, 6, 8)
        for symmetric in (True, False)
    },
    "packed, by channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, None),
    "packed, by channel, asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "channel", "symmetric": False},
        None,
    ),
    "packed, one scale": ("pack-quantized", {"num_bits": 8, "strategy": "tensor"}, None),
    "int8 by channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, TOKEN),
    "int8 by tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, TOKEN),
    "int8 asymmetric": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, TOKEN),
    "int4 in bytes": ("naive-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, None),
    "fp8 by tensor": ("float-quantized", {**FP8, "strategy": "tensor"}, {**FP8, "strategy": "tensor"}),
    "fp8 by channel": (
        "float-quantized",
        {**FP8, "strategy": "channel"},
        {**FP8, "strategy": "token", "dynamic": True},
    ),
    "fp8 alone": ("naive-quantized", {**FP8, "strategy": "channel"}, None),
    "fp8 in blocks": (
        "float-quantized",
        {**FP8, "strategy": "block", "block_structure": [32, 64]},
        {**FP8, "strategy": "group", "group_size": 64, "dynamic": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_library(case: str) -> None:
    layout, weights, inputs = CASES[case]
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if inputs is None else QuantizationArgs(**inputs),
    )
    compressor = BaseCompressor.get_value_from_registry(layout)
    written = compressor.compress(_calibrated(scheme.weights), scheme)
    expected = compressor.decompress(written, scheme)["weight"]
    is_static = inputs is not None and not inputs.get("dynamic")
    if is_static:
        written["input_scale"] = torch.tensor([0.5])
    weight = _decoded(layout, scheme, written)
    assert torch.equal(dequantized(weight), expected)
    if inputs is None:
        assert weight.inputs is None
    else:
        dtype = "int8" if inputs["type"] == "int" else "fp8_e4m3"
        assert weight.inputs == InputRounding(dtype, torch.tensor(0.5) if is_static else None, inputs.get("group_size"))  # type: ignore[arg-type]


def _calibrated(args: QuantizationArgs) -> dict[str, Tensor]:
    """A matrix with the library's scales for it."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -K % columns, 0, -N % rows))
        tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    else:
        groups = {"group": weight.unflatten(1, (-1, args.group_size or K)), "channel": weight.unsqueeze(1)}
        its = groups.get(args.strategy, weight.flatten()[None, None])
        low, high = its.amin(-1), its.amax(-1)
    scale, zero_point = calculate_qparams(low, high, args)
    if args.strategy == "tensor":
        scale, zero_point = scale.reshape(1), zero_point.reshape(1)
    return {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}


def _decoded(layout: str, scheme: QuantizationScheme, written: dict[str, Tensor]) -> QuantizedWeight:
    config = {"format": layout, "config_groups": {"group_0": scheme.model_dump()}}
    format = COMPRESSED_TENSORS_METHOD.parse(JsonFields("config.json", config)).format_of("m.weight")
    assert format is not None
    named = {f"m.{key}": tensor for key, tensor in written.items()}
    return decode(format, stored_parts(format, "m.weight", (N, K), named))
