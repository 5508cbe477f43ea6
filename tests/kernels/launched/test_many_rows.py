"""Products of many rows with quantized matrices, which cuBLAS computes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.quantized.device_weight import pack_for_device
from penstock.kernels.quantized.inputs import RoundedInputs
from penstock.kernels.triton.device import DeviceFacts
from penstock.kernels.triton.quantized import linear, many_rows
from penstock.kernels.triton.quantized.linear import quantized_linear_triton
from penstock.kernels.triton.quantized.many_rows import has_product_of_codes, product_of_codes
from tests.kernels.quantized_cases import FORMATS
from tests.kernels.quantized_products import assert_is_product, inputs_of, on

OF_FLOATS = [name for name in FORMATS if FORMATS[name](1, 64).inputs is None]
ON_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("name", OF_FLOATS)
def test_products_of_floats(device: str, dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of 256 outputs, the last of which has fewer."""
    monkeypatch.setattr(linear, "MOST_ROWS_OF_PACKED", 2)
    monkeypatch.setattr(many_rows, "_FLOATS_AT_A_TIME", 1)
    num_outputs, num_inputs = 264, 608 if dtype == torch.float16 else 512
    weight = FORMATS[name](num_outputs, num_inputs)
    x = inputs_of(torch.randn(3, num_inputs).to(dtype), weight)
    for bias in (None, torch.randn(num_outputs).to(dtype)):
        got = quantized_linear_triton(on(device, x), pack_for_device(weight, device), on(device, bias), dtype)
        assert_is_product(got.cpu(), x, weight, bias)


def scaled_product(
    x: Tensor, matrix: Tensor, x_scales: Tensor, scales: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """What torch documents of `_scaled_mm`, with what it demands of its arguments."""
    (num_rows, num_inputs), num_outputs = x.shape, matrix.shape[1]
    assert x.stride() == (num_inputs, 1)
    assert matrix.stride()[0] == 1
    assert num_inputs % 16 == num_outputs % 16 == 0
    if scales.shape == (1, num_outputs):
        assert x_scales.shape == (num_rows, 1)
        assert x_scales.is_contiguous()
        assert scales.is_contiguous()
    else:
        blocks = num_inputs // 128
        assert blocks % 4 == num_rows % 4 == 0
        assert (x_scales.shape, x_scales.stride()) == ((num_rows, blocks), (1, num_rows))
        assert (scales.shape, scales.stride()) == ((blocks, -(-num_outputs // 128)), (1, blocks))
        x_scales = x_scales.repeat_interleave(128, 1)
        scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :num_outputs]
    product = (x.double() * x_scales) @ (matrix.double() * scales)
    return (product if bias is None else product + bias).to(out_dtype)


def of_blocks(num_outputs: int, num_inputs: int) -> Any:
    """The format whose scales are for blocks of 128 outputs, too."""
    weight = FORMATS["FP8 blocks"](num_outputs, num_inputs)
    scales = weight.scales[::128].repeat_interleave(128, 0)[:num_outputs]
    return weight._replace(scales=scales.contiguous())


@pytest.mark.parametrize("name", ["FP8 W8A8", "FP8 W8A8, static", "FP8 blocks"])
@pytest.mark.parametrize("num_rows", [64, 65, 72])
def test_products_of_codes(device: str, name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By cuBLAS where there is a GPU that can; elsewhere by the formula, on arguments that cuBLAS would take."""
    weight = of_blocks(144, 1024) if name == "FP8 blocks" else FORMATS[name](144, 1024)
    packed, x = pack_for_device(weight, device), inputs_of(torch.randn(num_rows, 1024).bfloat16(), weight)
    assert isinstance(x, RoundedInputs)
    bias = torch.randn(144).bfloat16()
    if not ON_GPU:
        monkeypatch.setattr(torch, "_scaled_mm", scaled_product)
    elif not has_product_of_codes(on(device, x), packed, torch.bfloat16):
        pytest.skip("this GPU has none")
    for its_bias in (None, bias):
        got = product_of_codes(on(device, x), packed, on(device, its_bias), torch.bfloat16)
        assert_is_product(got.cpu(), x, weight, its_bias)
    if num_rows > 64:
        assert torch.equal(quantized_linear_triton(on(device, x), packed, on(device, bias), torch.bfloat16), got)


@pytest.mark.parametrize("name", ["FP8 W8A8", "FP8 W8A8, static", "FP8 blocks"])
def test_torch_takes_the_arguments(name: str) -> None:
    """As far as it checks those without storage."""
    weight = of_blocks(144, 1024) if name == "FP8 blocks" else FORMATS[name](144, 1024)
    packed, x = pack_for_device(weight, "cpu"), inputs_of(torch.randn(71, 1024), weight)
    moved = {key: on("meta", its) for key, its in packed._asdict().items() if isinstance(its, Tensor)}
    packed = packed._replace(**moved, planes=(packed.planes[0].to("meta"),))
    got = product_of_codes(on("meta", x), packed, None, torch.bfloat16)
    assert (got.shape, got.dtype) == ((71, 144), torch.bfloat16)


def test_where_there_is_a_product_of_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, blocks = FORMATS["FP8 W8A8"](144, 1024), of_blocks(144, 1024)
    x = torch.randn(65, 1024)

    def has(weight: Any, capability: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> bool:
        monkeypatch.setattr(many_rows, "device_facts", lambda _: DeviceFacts(100, capability))
        return has_product_of_codes(inputs_of(x[:, : weight.num_inputs], weight), pack_for_device(weight, "cpu"), dtype)

    assert [has(rows, at) for at in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))] == [False, True, True, True, False]
    assert [has(blocks, at) for at in ((8, 9), (9, 0), (10, 0))] == [False, True, False]
    assert not has(rows, (9, 0), torch.float16)
    assert not has(FORMATS["FP8 W8A8"](136, 1024), (9, 0))
    assert not has(FORMATS["FP8 W8A8"](144, 1000), (9, 0))
    assert not has(of_blocks(144, 640), (9, 0))  # rows of scales would not be aligned
    assert not has(FORMATS["FP8 blocks"](144, 1024), (9, 0))  # each output has scales of its own
    assert not has(FORMATS["INT8 W8A8"](144, 1024), (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert has(rows, (9, 0))
    assert not has(blocks, (9, 0))


def test_scales_of_blocks_are_kept() -> None:
    weight = of_blocks(300, 512)
    packed = pack_for_device(weight, "cpu")
    assert packed.block_scales is not None
    assert torch.equal(packed.block_scales.repeat_interleave(128, 0)[:300], weight.scales)
