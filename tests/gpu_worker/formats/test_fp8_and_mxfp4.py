"""FP8 and MXFP4 as the code of transformers dequantizes them."""

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.gpu_worker.formats.registry import decode
from penstock.kernels.quantized.weight import InputRounding, dequantized
from penstock.models.formats.format import Inputs
from penstock.models.formats.fp8 import FP8Matrix
from penstock.models.formats.mxfp4 import MXFP4Matrix
from tests.gpu_worker.formats.stored import stored_parts

DYNAMIC = Inputs("fp8_e4m3", is_static=False, group=32)


def _codes(*shape: int) -> torch.Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100
    return numbers.clamp(-448, 448).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "power of two"])
@pytest.mark.parametrize("experts", [(), (3,)])
def test_fp8_in_blocks(experts: tuple[int, ...], kind: str) -> None:
    codes, scales = _codes(*experts, 64, 96), torch.rand(*experts, 2, 3) + 0.01
    if kind == "bf16":
        scales = scales.bfloat16()
    elif kind == "power of two":
        scales = torch.randint(110, 130, scales.shape, dtype=torch.uint8)
    expected = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    tensors = {"m.weight": codes, "m.weight_scale_inv": scales}
    format = FP8Matrix((32, 32), DYNAMIC)
    weight = decode(format, stored_parts(format, "m.weight", tuple(codes.shape), tensors))
    assert torch.equal(dequantized(weight), expected)
    assert weight.inputs == InputRounding("fp8_e4m3", None, 32)


def test_fp8_whose_last_blocks_are_cut_off() -> None:
    codes, scales = _codes(40, 70), torch.rand(2, 3) + 0.01
    format = FP8Matrix((32, 32), DYNAMIC)
    tensors = {"m.weight": codes, "m.weight_scale_inv": scales}
    weight = decode(format, stored_parts(format, "m.weight", (40, 70), tensors))
    spread = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)[:40, :70]
    assert torch.equal(dequantized(weight), codes.float() * spread)


@pytest.mark.parametrize("names", [("weight_scale_inv", "activation_scale"), ("weight_scale", "input_scale")])
def test_fp8_with_one_scale_by_both_names(names: tuple[str, str]) -> None:
    codes, scale = _codes(40, 70), torch.tensor([0.25])
    format = FP8Matrix(None, Inputs("fp8_e4m3", is_static=True))
    tensors = {"m.weight": codes, f"m.{names[0]}": scale, f"m.{names[1]}": torch.tensor(0.5)}
    weight = decode(format, stored_parts(format, "m.weight", (40, 70), tensors))
    assert torch.equal(dequantized(weight), codes.float() * 0.25)
    assert weight.inputs == InputRounding("fp8_e4m3", torch.tensor(0.5), None)


def test_mxfp4() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 24, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (3, 24, 2), dtype=torch.uint8, generator=generator)
    scales[0, 0] = torch.tensor([0, 254])  # 2^-127 and 2^127
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    tensors = {"m.experts.down_proj_blocks": blocks, "m.experts.down_proj_scales": scales}
    format = MXFP4Matrix()
    weight = decode(format, stored_parts(format, "m.experts.down_proj", (3, 24, 64), tensors))
    assert torch.equal(dequantized(weight), expected)
