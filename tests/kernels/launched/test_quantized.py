"""Products with quantized matrices, rows of them, and rounded inputs."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.activation import Activation, ActivationKind
from penstock.kernels.experts.experts import group_rows
from penstock.kernels.quantized import linear
from penstock.kernels.quantized.device_weight import pack_for_device
from penstock.kernels.quantized.inputs import RoundedInputs, round_inputs_reference
from penstock.kernels.quantized.weight import InputRounding, dequantized, stacked
from penstock.kernels.triton.activation import activation_triton, gated_activation_triton
from penstock.kernels.triton.device import DeviceFacts
from penstock.kernels.triton.experts.experts import group_rows_triton
from penstock.kernels.triton.quantized import linear as quantized_linear
from penstock.kernels.triton.quantized.inputs import round_inputs_triton
from penstock.kernels.triton.quantized.linear import (
    VECTOR,
    choose_splits,
    choose_tiles,
    grouped_quantized_linear_triton,
    multiplies_codes,
    quantized_linear_triton,
)
from penstock.kernels.triton.quantized.rows import quantized_rows_triton
from tests.kernels.interpreter_limits import dtypes
from tests.kernels.pairs import every
from tests.kernels.quantized_cases import FORMATS, experts_of
from tests.kernels.quantized_products import UNIT, assert_is_product, inputs_of, on, x_of


@pytest.mark.parametrize(
    ("name", "num_rows", "shape", "its_dtype"),
    every(tuple(FORMATS), (1, 3, 70), ((40, 512), (136, 208)), tuple(dtypes())),
)
def test_products(device: str, its_dtype: torch.dtype, name: str, num_rows: int, shape: tuple[int, int]) -> None:
    weight = FORMATS[name](*shape)
    x = inputs_of(torch.randn(num_rows, shape[1]).to(its_dtype), weight)
    bias = torch.randn(shape[0]).to(its_dtype) if shape[0] == 40 else None
    got = quantized_linear_triton(on(device, x), pack_for_device(weight, device), on(device, bias), its_dtype)
    assert_is_product(got.cpu(), x, weight, bias)


@pytest.mark.parametrize(("name", "num_rows"), [("Q4_K", 1), ("GPTQ", 2), ("INT8 W8A8", 2), ("FP8 blocks", 2)])
def test_programs_share_outputs(device: str, name: str, num_rows: int) -> None:
    """Many inputs and few outputs; the last program has fewer inputs."""
    weight = FORMATS[name](24, 4352)
    packed = pack_for_device(weight, device)
    x, bias = inputs_of(torch.randn(num_rows, 4352), weight), torch.randn(24)
    tiles = VECTOR if num_rows == 1 else choose_tiles(x, packed, 16, torch.float32)
    splits, of_each = choose_splits(packed, tiles, 1)
    assert splits > 2
    assert (splits - 1) * of_each < 4352 < splits * of_each
    got = quantized_linear_triton(on(device, x), packed, on(device, bias), torch.float32)
    assert_is_product(got.cpu(), x, weight, bias)


def test_sums_of_integers_are_exact(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one program; programs that share outputs multiply theirs by the scales."""
    monkeypatch.setattr(quantized_linear, "choose_splits", lambda *_: (1, 1600))
    weight = FORMATS["INT8 W8A8"](24, 1600)
    codes = torch.randint(-127, 128, (20, 1600), dtype=torch.int8)
    codes[0] = 127
    weight.codes[0] = 255
    x = RoundedInputs(codes, torch.rand(20, 1), 1600)
    packed = pack_for_device(weight, device)
    assert multiplies_codes(x, packed)
    sums = (codes.long() @ (weight.codes.long() - 128).T).float()
    got = quantized_linear_triton(on(device, x), packed, None, torch.float32)
    assert torch.equal(got.cpu(), sums * x.scales * weight.scales.float().view(1, -1))


def test_tensors_on_a_gpu_go_there(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the order of inputs, which rounding by token does not change."""
    monkeypatch.setattr(Tensor, "is_cuda", True)
    weight = FORMATS["GPTQ, desc_act"](24, 192)._replace(inputs=InputRounding("int8"))
    packed, x, ids = pack_for_device(weight, device), torch.randn(3, 192), torch.tensor([[1], [0], [1]]).int()
    assert_is_product(linear.quantized_linear(x.to(device), packed).cpu(), inputs_of(x, weight), weight, None)
    rows = linear.rows(packed, ids.flatten().to(device), torch.float32).cpu()
    torch.testing.assert_close(rows, dequantized(weight)[ids.flatten()])
    both = stacked([weight, FORMATS["GPTQ"](24, 192)._replace(group=64, scales=weight.scales, zeros=weight.zeros,
                    order=weight.order, inputs=weight.inputs)])  # fmt: skip
    assert both is not None
    grouped = group_rows(ids.to(device), 2)
    got = linear.grouped_quantized_linear(x.to(device), grouped, pack_for_device(both, device), of_tokens=True).cpu()
    for expert in (0, 1):
        rows_of_it = (ids.flatten() == expert).nonzero().flatten()
        its = both.of_expert(expert)
        assert_is_product(got[rows_of_it], x_of(inputs_of(x, its), rows_of_it), its, None)


@pytest.mark.parametrize("name", ["FP8 W8A8", "FP8 blocks"])
def test_fp8_where_products_have_none(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On older GPUs both sides are widened."""
    weight = FORMATS[name](40, 384)
    packed = pack_for_device(weight, device)
    x = inputs_of(torch.randn(5, 384).half(), weight)
    assert multiplies_codes(x, packed)
    monkeypatch.setattr(quantized_linear, "device_facts", lambda _: DeviceFacts(108, (8, 0)))
    assert not multiplies_codes(x, packed)
    assert_is_product(quantized_linear_triton(on(device, x), packed, None, torch.float16).cpu(), x, weight, None)


@pytest.mark.parametrize(
    ("name", "num_tokens", "options"),
    [
        ("MXFP4", 3, "bias"),
        ("GPTQ", 60, "scales"),
        ("Q5_K", 4, ""),
        ("Q6_K", 2, "scales"),
        ("FP8 blocks", 40, "bias"),
        ("FP8 W8A8, static", 3, "scales"),
        ("INT8 W8A8", 70, "bias, scales"),
        ("W4A8", 2, ""),
    ],
)
def test_products_of_experts(device: str, name: str, num_tokens: int, options: str) -> None:
    """From tokens to rows, and from rows to rows."""
    num_experts, top_k, num_outputs, num_inputs = 5, 2, 72, 256
    weight = experts_of(name, num_experts, num_outputs, num_inputs)
    packed = pack_for_device(weight, device)
    ids = torch.rand(num_tokens, num_experts - 1).argsort(-1)[:, :top_k].int()
    x = inputs_of(torch.randn(num_tokens, num_inputs).half(), weight)
    bias = torch.randn(num_experts, num_outputs).half() if "bias" in options else None
    scales = torch.rand(num_tokens, top_k) if "scales" in options else None
    grouped = group_rows_triton(ids.to(device), num_experts)
    got = grouped_quantized_linear_triton(
        on(device, x), grouped, packed, on(device, bias), torch.float16, of_tokens=True, scales=on(device, scales)
    ).cpu()
    spread = x_of(x, torch.arange(num_tokens * top_k) // top_k)
    again = grouped_quantized_linear_triton(on(device, spread), grouped, packed, on(device, bias), torch.float16)
    assert scales is not None or torch.equal(again.cpu(), got)
    for expert in ids.unique().tolist():
        rows = (ids.flatten() == expert).nonzero().flatten()
        its_bias = None if bias is None else bias[expert]
        its_scales = None if scales is None else scales.flatten()[rows]
        assert_is_product(got[rows], x_of(spread, rows), weight.of_expert(expert), its_bias, its_scales)


@pytest.mark.parametrize("name", FORMATS)
def test_rows(device: str, dtype: torch.dtype, name: str) -> None:
    weight = FORMATS[name](9, 96 if dtype == torch.float16 else 1024)
    ids = torch.tensor([8, 0, 3, 3])
    got = quantized_rows_triton(pack_for_device(weight, device), ids.to(device), dtype)
    # Products of two fp32 numbers are rounded before they are added, or not.
    torch.testing.assert_close(got.cpu(), dequantized(weight)[ids].to(dtype), rtol=2 * UNIT[dtype], atol=1e-6)


@pytest.mark.parametrize("rounding", [
    InputRounding("int8"), InputRounding("int8", torch.tensor(0.02)), InputRounding("int8", group=64),
    InputRounding("fp8_e4m3"), InputRounding("fp8_e4m3", torch.tensor(0.01)), InputRounding("fp8_e4m3", group=128),
], ids=str)  # fmt: skip
def test_rounded_inputs(device: str, dtype: torch.dtype, rounding: InputRounding) -> None:
    """Bit for bit, numbers in the middle between two codes included."""
    x = torch.randn(6, 200) * torch.logspace(-3, 1, 200)
    x[1] = 0
    x[2] = torch.arange(200) / 200 - 0.5
    x[3, :128] = torch.arange(128) / 2
    x[4, 5] = float("nan")
    x[5] = torch.logspace(-9, 4, 200)
    x = x.to(dtype)
    expected = round_inputs_reference(x, rounding)
    scale = None if rounding.scale is None else rounding.scale.to(device)
    got = round_inputs_triton(x.to(device), rounding._replace(scale=scale))
    is_number = ~expected.scales.isnan()
    assert torch.equal(got.scales.cpu().isnan(), ~is_number)
    assert torch.equal(got.scales.cpu()[is_number], expected.scales[is_number])
    tokens = [0, 1, 2, 3, 5]
    assert torch.equal(got.codes.cpu().view(torch.uint8)[tokens], expected.codes.view(torch.uint8)[tokens])
    assert got.codes.dtype == expected.codes.dtype
    assert got.group >= rounding.group if rounding.group else got.group >= 200


@pytest.mark.parametrize("kind", ["silu", "clamped_swiglu", "relu2"])
def test_activated_and_rounded_inputs(device: str, dtype: torch.dtype, kind: ActivationKind) -> None:
    """As if the activation's numbers were stored in between."""
    its = Activation(kind, is_gated=kind != "relu2")
    x = torch.randn(3, 400 if its.is_gated else 200, device=device).to(dtype)
    x[1, 2] = float("nan")
    of = activation_triton if kind == "relu2" else gated_activation_triton
    for rounding in (InputRounding("int8"), InputRounding("fp8_e4m3", group=64)):
        got, expected = round_inputs_triton(x, rounding, its), round_inputs_triton(of(x, kind), rounding)
        assert torch.equal(got.scales.nan_to_num(9.0), expected.scales.nan_to_num(9.0))
        assert torch.equal(got.codes[::2].view(torch.uint8), expected.codes[::2].view(torch.uint8))


def test_every_number_of_half_precision_becomes_the_nearest_of_fp8(device: str) -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16).view(64, 1024)
    x = x.float() / 64  # numbers below the smallest, too
    rounding = InputRounding("fp8_e4m3", torch.tensor(1.0))
    got = round_inputs_triton(x.to(device), rounding._replace(scale=torch.ones((), device=device))).codes.cpu().float()
    expected = round_inputs_reference(x, rounding).codes.float()
    assert torch.equal(got.nan_to_num(999), expected.nan_to_num(999))


def test_what_is_not_a_number_stays_in_its_token(device: str) -> None:
    for name in ("INT8 W8A8", "FP8 blocks", "Q4_K"):
        weight = FORMATS[name](24, 256)
        packed = pack_for_device(weight, device)
        x = torch.randn(3, 256)
        expected = quantized_linear_triton(on(device, inputs_of(x, weight)), packed, None, torch.float32)
        x[1, 7] = float("nan")
        got = quantized_linear_triton(on(device, inputs_of(x, weight)), packed, None, torch.float32)
        assert torch.equal(got[::2], expected[::2])
        assert bool(got[1].isnan().all())


def test_no_tokens(device: str) -> None:
    packed = pack_for_device(experts_of("MXFP4", 3, 16, 64), device)
    x = torch.zeros(0, 64, device=device)
    grouped = group_rows_triton(torch.zeros(0, 2, dtype=torch.int32, device=device), 3)
    assert grouped_quantized_linear_triton(x, grouped, packed, None, torch.float32, of_tokens=True).shape == (0, 16)
    packed = pack_for_device(FORMATS["Q4_0"](16, 64), device)
    assert quantized_linear_triton(x, packed, None, torch.float32).shape == (0, 16)
    ids = torch.zeros(0, dtype=torch.int64, device=device)
    assert quantized_rows_triton(packed, ids, torch.float32).shape == (0, 64)
    assert round_inputs_triton(x, InputRounding("int8")).codes.shape == (0, 64)
