"""Packed matrices are what they were, and torch's products with them are those of the formula."""

import pytest
import torch

from penstock.kernels.activation import Activation
from penstock.kernels.experts.experts import group_rows
from penstock.kernels.quantized import device_weight, linear
from penstock.kernels.quantized.device_weight import pack_experts_for_device, unpacked
from penstock.kernels.quantized.inputs import as_floats, round_inputs
from penstock.kernels.quantized.linear import grouped_quantized_linear, pack_for_device, quantized_linear, rows
from penstock.kernels.quantized.weight import InputRounding, QuantizedWeight, dequantized, stacked
from tests.kernels.quantized_cases import FORMATS, exact_product, experts_of

N, K = 20, 320


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_inputs", [K, 90])
def test_packed_and_unpacked(name: str, num_inputs: int) -> None:
    weight = FORMATS[name](N, num_inputs)
    packed = pack_for_device(weight, "cpu")
    assert torch.equal(dequantized(unpacked(packed)), dequantized(weight))
    ids = torch.tensor([3, 0, 3])
    assert torch.equal(rows(packed, ids, torch.float32), dequantized(weight)[ids])
    padded = num_inputs + -num_inputs % 128
    assert sum(plane.nbytes for plane in packed.planes) <= N * padded * weight.bits // 8
    assert packed.num_bytes >= N * num_inputs * weight.bits // 8


@pytest.mark.parametrize("name", ["MXFP4", "Q5_K", "INT8 W8A8", "GPTQ", "FP8 blocks"])
def test_experts_are_packed_one_by_one(name: str) -> None:
    """As if they were stacked before; also if the scales of one need more bytes than those of another."""
    experts = [FORMATS[name](N, K) for _ in range(3)]
    for last in (experts[2], experts[2]._replace(scales=experts[2].scales * 3)):
        each = [*experts[:2], last]
        together = stacked(each)
        assert together is not None
        got, expected = pack_experts_for_device(each, "cpu"), pack_for_device(together, "cpu")
        assert got.scales.dtype == expected.scales.dtype
        assert all(torch.equal(mine, its) for mine, its in zip(got.planes, expected.planes, strict=True))
        for expert in range(3):
            assert torch.equal(dequantized(unpacked(got, expert=expert)), dequantized(each[expert]))


def test_large_matrices_are_packed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = FORMATS["Q5_K"](N, K)
    monkeypatch.setattr(device_weight, "_PACKED_AT_A_TIME", 3 * K)
    assert torch.equal(dequantized(unpacked(pack_for_device(weight, "cpu"))), dequantized(weight))


def test_scales_take_the_fewest_bytes() -> None:
    """Powers of two take one, and what half precision holds takes two."""
    assert pack_for_device(FORMATS["MXFP4"](N, K), "cpu").scales.dtype == torch.uint8
    of_gguf = pack_for_device(FORMATS["MXFP4 of GGUF"](N, K), "cpu")
    assert (of_gguf.scales.dtype, of_gguf.numbers) == (torch.uint8, "e2m1")
    weight = FORMATS["Q4_0"](N, K)
    assert pack_for_device(weight._replace(scales=weight.scales.float()), "cpu").scales.dtype == torch.float16
    assert pack_for_device(FORMATS["NF4"](N, K), "cpu").scales.dtype == torch.float32


@pytest.mark.parametrize("name", FORMATS)
def test_product(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, where the only errors are those of sums; the matrix is unpacked in several parts."""
    monkeypatch.setattr(linear, "_UNPACKED_AT_A_TIME", 7 * K)
    weight = FORMATS[name](N, K)
    x, bias = torch.randn(3, K), torch.randn(N)
    got = quantized_linear(x, pack_for_device(weight, "cpu"), bias)
    rounded = x
    if weight.inputs is not None:  # what rounded inputs are is tested below
        rounded = as_floats(round_inputs(x, weight.inputs))
    expected, magnitude = exact_product(rounded, weight)
    bound = K * 2**-24 * magnitude + 2**-22 * (expected.abs() + bias.abs())
    assert bool(((got.double() - expected - bias).abs() <= bound).all())
    low = quantized_linear(x.bfloat16(), pack_for_device(weight, "cpu"))
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), expected.float(), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("name", ["Q4_K", "MXFP4", "INT8 W8A8", "FP8 blocks", "INT8 W8A8, static"])
@pytest.mark.parametrize("has_scales", [False, True])
def test_product_of_experts(name: str, has_scales: bool) -> None:
    num_experts, top_k, num_tokens = 4, 2, 5
    weight = experts_of(name, num_experts, N, K)
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).int()
    x, bias = torch.randn(num_tokens, K), torch.randn(num_experts, N)
    scales = torch.rand(num_tokens, top_k) if has_scales else None
    grouped = group_rows(ids, num_experts)
    packed = pack_for_device(weight, "cpu")
    got = grouped_quantized_linear(x, grouped, packed, bias, of_tokens=True, scales=scales)
    again = grouped_quantized_linear(x.repeat_interleave(top_k, 0)[grouped.rows], grouped, packed, bias)
    if scales is None:
        assert torch.equal(got, again)
    for place, row in enumerate(grouped.rows.tolist()):
        token, expert = row // top_k, int(ids.flatten()[row])
        plain = quantized_linear(x[token : token + 1], pack_for_device(weight.of_expert(expert), "cpu"))[0]
        factor = 1.0 if scales is None else float(scales.flatten()[row])
        torch.testing.assert_close(got[place], plain * factor + bias[expert], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Q4_K", "INT8 W8A8", "GPTQ, desc_act"])
def test_product_of_an_activation(name: str) -> None:
    weight, bias = FORMATS[name](N, K), torch.randn(N)
    packed, x = pack_for_device(weight, "cpu"), torch.randn(3, 2 * K)
    for its in (Activation("silu"), Activation("gelu", is_gated=False)):
        inner = x if its.is_gated else x[:, :K]
        got = quantized_linear(inner, packed, bias, activation=its)
        assert torch.equal(got, quantized_linear(its(inner), packed, bias))
    experts = pack_for_device(experts_of(name, 3, N, K), "cpu")
    grouped = group_rows(torch.tensor([[2], [0], [2]], dtype=torch.int32), 3)
    got = grouped_quantized_linear(x, grouped, experts, activation=Activation("silu"))
    assert torch.equal(got, grouped_quantized_linear(Activation("silu")(x), grouped, experts))
    with pytest.raises(ValueError, match="does not fit"):
        quantized_linear(x[:, :K], packed, activation=Activation("silu"))


def test_sums_of_integers_are_exact() -> None:
    """Of many inputs, whose sum is beyond 2**24."""
    num_inputs = 5000
    weight = FORMATS["INT8 W8A8"](3, num_inputs)._replace(codes=torch.full((3, num_inputs), 255, dtype=torch.uint8))
    x = torch.full((2, num_inputs), 1.5)
    x[0, 0] = 0.7
    codes = round_inputs(x, InputRounding("int8")).codes.long()
    sums = codes.sum(1, keepdim=True) * 127
    expected = sums.float() * (1.5 / torch.tensor(127.0)) * weight.scales.view(1, 3)
    assert torch.equal(quantized_linear(x, pack_for_device(weight, "cpu")), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_inputs(dtype: torch.dtype) -> None:
    x = torch.randn(3, 300).to(dtype)
    x[1] = 0
    int8 = round_inputs(x, InputRounding("int8"))
    scale = x.float().abs().amax(1, keepdim=True) / 127
    assert torch.equal(int8.scales, scale)
    assert torch.equal(int8.codes.float(), (x.float() / torch.where(scale == 0, 1, scale)).round())
    fp8 = round_inputs(x, InputRounding("fp8_e4m3", group=128))
    assert fp8.scales.shape == (3, 3)
    assert torch.equal(fp8.scales[:, 2], x[:, 256:].float().abs().amax(1) / 448)
    # Three bits of mantissa, and 448 steps of the smallest numbers.
    error = (as_floats(fp8) - x.float()).abs()
    of_group = fp8.scales.repeat_interleave(128, 1)[:, :300]
    assert bool((error <= (x.float().abs() * 2**-4).maximum(of_group * 2**-10) * 1.001).all())
    static = InputRounding("int8", torch.tensor(0.01))
    assert round_inputs(torch.tensor([[-9.0, 0.005, 0.015, 9.0]]), static).codes.tolist() == [[-128, 0, 2, 127]]


@pytest.mark.parametrize("name", ["INT8 W8A8", "FP8 W8A8", "FP8 blocks", "W4A8"])
def test_what_is_not_a_number_stays_in_its_token(name: str) -> None:
    packed = pack_for_device(FORMATS[name](N, K), "cpu")
    x = torch.randn(3, K)
    expected = quantized_linear(x, packed)
    x[1, 7] = float("nan")
    got = quantized_linear(x, packed)
    assert torch.equal(got[::2], expected[::2])
    assert bool(got[1].isnan().all())


def test_what_does_not_fit_is_refused() -> None:
    weight: QuantizedWeight = FORMATS["Q4_0"](N, K)
    packed = pack_for_device(weight, "cpu")
    with pytest.raises(ValueError, match="does not fit"):
        quantized_linear(torch.randn(2, K + 1), packed)
    with pytest.raises(ValueError, match="does not fit"):
        grouped_quantized_linear(torch.randn(2, K), group_rows(torch.zeros(2, 1, dtype=torch.int32), 1), packed)
    with pytest.raises(ValueError, match="7 bits"):
        pack_for_device(weight._replace(bits=7), "cpu")
    with pytest.raises(ValueError, match="scales are"):
        pack_for_device(weight._replace(group=64), "cpu")
