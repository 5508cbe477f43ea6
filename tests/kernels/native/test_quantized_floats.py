"""Products of floats with quantized weights by the CPU's own kernels."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels.experts.routing import Routing
from penstock.kernels.native.experts.packed import PackedExperts
from penstock.kernels.native.library import Library, PackedLinear
from penstock.kernels.quantized.inputs import as_floats, round_inputs_reference
from penstock.kernels.quantized.weight import InputRounding, QuantizedWeight, dequantized
from tests.kernels.native.native_library import load_library, native_experts, native_linear
from tests.kernels.quantized_cases import FORMATS, LAYOUTS, exact_product

ALL = FORMATS | LAYOUTS
IN_FLOATS = [name for name, make in ALL.items() if (its := make(16, 640).inputs) is None or its.dtype == "fp8_e4m3"]
IN_PAIRS = [name for name in ALL if "FP8" in name or name == "NF4"]
WHOLE = [name for name in ALL if name != "zeros and minimums"]  # there zeros become a part of minimums
SHAPES = [(35, 640, 3), (130, 515, 30), (16, 32, 1)]
EPS = 2.0**-24


@pytest.fixture(scope="module", params=[1, 2], ids=["one thread", "two threads"])
def library(request: pytest.FixtureRequest) -> Library:
    return load_library(request.param)


def made(name: str, num_outputs: int, num_inputs: int) -> QuantizedWeight:
    torch.manual_seed(num_outputs + num_inputs)
    return ALL[name](num_outputs, num_inputs)


def outputs(library: Library, packed: PackedLinear, x: Tensor) -> Tensor:
    """fp32[T, N]"""
    found = native_linear(library, packed, x)
    if packed.interleaved:
        found = found.view(len(x), -1, 2, 16).transpose(1, 2).reshape(len(x), 2, -1)
        return found[..., : packed.num_outputs // 2].flatten(1)
    return found[:, : packed.num_outputs]


def as_multiplied(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Inputs as the weight's checkpoint wants them rounded."""
    return x if weight.inputs is None else as_floats(round_inputs_reference(x, weight.inputs))


@pytest.mark.parametrize("name", IN_FLOATS)
@pytest.mark.parametrize(("n", "k", "num_tokens"), SHAPES)
def test_products_of_floats(library: Library, name: str, n: int, k: int, num_tokens: int) -> None:
    """Only sums are rounded: by half a unit in the last place for each input, relative to the sum of magnitudes."""
    weight, bias = made(name, n, k), torch.randn(n)
    packed = library.pack_quantized(weight, bias, interleaved=n % 2 == 0)
    assert packed.kind == "quantized_fp32"
    x = torch.randn(num_tokens, k)
    expected, magnitudes = exact_product(as_multiplied(x, weight), weight)
    error = (outputs(library, packed, x) - bias - expected).abs()
    assert (error <= EPS * ((k + 2) * magnitudes + 4 * bias.abs())).all()


def test_inputs_are_rounded_in_the_order_of_the_weights(library: Library) -> None:
    """Each group of ordered inputs has its own scale; a few channels are far larger than the others."""
    weight = made("GPTQ, desc_act", 35, 600)._replace(inputs=InputRounding("fp8_e4m3", group=64))
    assert weight.order is not None
    assert weight.inputs is not None
    x = torch.randn(3, 600)
    x[:, :8] *= 100
    rounded = as_floats(round_inputs_reference(x[:, weight.order], weight.inputs))
    expected, magnitudes = exact_product(rounded, weight._replace(order=None, inputs=None))
    found = outputs(library, library.pack_quantized(weight), x)
    assert ((found - expected).abs() <= EPS * 602 * magnitudes).all()


def test_whole_numbers_with_rounded_floats(library: Library) -> None:
    """A table of whole numbers is multiplied as integers are, so it has no pairs of bf16."""
    weight = made("MXFP4", 35, 640)._replace(inputs=InputRounding("fp8_e4m3", group=128))
    x = torch.randn(3, 640)
    packed = library.pack_quantized(weight, rounds_inputs=True)
    assert packed.kind == "quantized_fp32"
    expected, magnitudes = exact_product(as_multiplied(x, weight), weight)
    assert ((outputs(library, packed, x) - expected).abs() <= EPS * 642 * magnitudes).all()


@pytest.mark.parametrize("name", IN_FLOATS)
def test_weights_are_the_numbers_that_are_meant(library: Library, name: str) -> None:
    """So the bits are those of a product with these numbers themselves."""
    weight, x = made(name, 80, 608), torch.randn(14, 608)
    matrix = dequantized(weight)
    if weight.order is not None:
        matrix = matrix[:, weight.order]
    of_floats = outputs(library, library.pack(matrix), as_multiplied(x, weight)[:, weight.order].squeeze(1))
    assert torch.equal(outputs(library, library.pack_quantized(weight), x), of_floats)


@pytest.mark.parametrize("name", IN_PAIRS)
@pytest.mark.parametrize(("n", "k", "num_tokens"), SHAPES)
def test_products_of_bf16(library: Library, name: str, n: int, k: int, num_tokens: int) -> None:
    """Inputs and values are rounded to bf16; those that are FP8 are so already."""
    weight, x = made(name, n, k), torch.randn(num_tokens, k)
    packed = library.pack_quantized(weight, rounds_inputs=True)
    assert packed.kind == "quantized_bf16"
    assert weight.values is not None
    rounded = x.bfloat16() if weight.inputs is None else as_multiplied(x, weight)
    of_bf16 = weight._replace(values=weight.values.bfloat16().float())
    expected, magnitudes = exact_product(rounded, of_bf16)
    error = (outputs(library, packed, x) - expected).abs()
    assert (error <= EPS * (k + 6) * magnitudes).all()


@pytest.mark.parametrize("rounds_inputs", [False, True])
@pytest.mark.parametrize("name", ["NF4", "FP8 weights", "FP8 blocks", "FP8 W8A8", "GPTQ, desc_act", "Q4_K"])
def test_the_same_bits_in_any_batch(library: Library, name: str, rounds_inputs: bool) -> None:
    packed = library.pack_quantized(made(name, 100, 544), torch.randn(100), rounds_inputs=rounds_inputs)
    x = torch.randn(270, 544)
    expected = torch.cat([native_linear(library, packed, row[None]) for row in x])
    assert not bool(expected.isnan().any())
    for count in (*range(2, 27), 270):
        assert torch.equal(native_linear(library, packed, x[:count]), expected[:count]), count


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", WHOLE)
def test_what_is_packed_can_be_unpacked(library: Library, name: str, interleaved: bool) -> None:
    """Each number as `dequantized` computes it, in fp32 and rounded to bf16; and rows alone."""
    weight = made(name, 70, 515)
    matrix = dequantized(weight)
    for rounds_inputs in (False, True):
        packed = library.pack_quantized(weight, interleaved=interleaved, rounds_inputs=rounds_inputs)
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.full((70, 515), torch.nan, dtype=dtype)
            library.unpack(packed, out)
            assert torch.equal(out, matrix.to(dtype))
    if not interleaved:
        ids = torch.tensor([69, 0, 17, 17])
        assert torch.equal(library.rows(packed, ids), matrix[ids])


def test_every_fp8_code_is_widened(library: Library) -> None:
    """Exactly: also the smallest numbers, and those that are none."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, -1)
    values = codes[0].view(torch.float8_e4m3fn).float()
    weight = QuantizedWeight(codes, 8, 256, torch.ones(1, 1), values=values)
    packed = library.pack_quantized(weight)
    found = library.rows(packed, torch.tensor([0]))[0]
    assert torch.equal(found.isnan(), values.isnan())
    assert torch.equal(found.nan_to_num(), values.nan_to_num())
    assert torch.equal(found.signbit(), values.signbit())
    for rounds_inputs in (False, True):
        of_each = library.pack_quantized(_transposed(values), rounds_inputs=rounds_inputs)
        one = torch.zeros(1, 32)
        one[0, 3] = 1
        products = outputs(library, of_each, one)[0]
        assert torch.equal(products.isnan(), values.isnan())
        assert torch.equal(products.nan_to_num(), values.nan_to_num())


def _transposed(values: Tensor) -> QuantizedWeight:
    """Every code in each row's fourth column, zeros elsewhere."""
    codes = torch.zeros(256, 32, dtype=torch.uint8)
    codes[:, 3] = torch.arange(256)
    return QuantizedWeight(codes, 8, 32, torch.ones(256, 1), values=values)


@pytest.mark.parametrize("name", ["MXFP4", "NF4", "FP8 blocks", "Q4_K"])
def test_experts_of_quantized_weights(library: Library, name: str) -> None:
    """Of floats: as experts that have these numbers. Of rounded inputs: the same bits in any batch."""
    count, hidden, inner = 5, 160, 96
    torch.manual_seed(0)
    up = [ALL[name](2 * inner, hidden)._replace(inputs=None) for _ in range(count)]
    down = [ALL[name](hidden, inner)._replace(inputs=None) for _ in range(count)]
    router, x = library.pack(torch.randn(count, hidden)), torch.randn(40, hidden)

    def packed(pack: Callable[..., PackedLinear], **options: bool) -> PackedExperts:
        gate_up = [pack(weight, interleaved=True, **options) for weight in up]
        return PackedExperts(router, gate_up, [pack(weight, **options) for weight in down], Routing(top_k=2), None, 0)

    def pack_numbers(weight: QuantizedWeight, *, interleaved: bool = False) -> PackedLinear:
        return library.pack(dequantized(weight), interleaved=interleaved)

    exact = native_experts(library, packed(library.pack_quantized), x)
    assert torch.equal(exact, native_experts(library, packed(pack_numbers), x))
    rounding = packed(library.pack_quantized, rounds_inputs=True)
    whole = native_experts(library, rounding, x)
    assert torch.equal(torch.cat([native_experts(library, rounding, row[None]) for row in x]), whole)
    assert (whole - exact).abs().max() < 0.05 * exact.abs().max()
    assert not torch.equal(whole, exact)
