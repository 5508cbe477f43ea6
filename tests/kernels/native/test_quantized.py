"""Products of quantized weights by the CPU's own kernels."""

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.experts.routing import Routing
from penstock.kernels.native.experts.packed import PackedExperts
from penstock.kernels.native.library import Library, PackedLinear
from penstock.kernels.native.program.builder import ACTIVATIONS
from penstock.kernels.native.quantized.layout import SCALE_TYPES
from penstock.kernels.quantized.inputs import as_floats, round_inputs
from penstock.kernels.quantized.weight import InputRounding, QuantizedWeight, dequantized
from tests.kernels.native.native_library import load_library, native_experts, native_linear, native_route
from tests.kernels.quantized_cases import LAYOUTS

NUMBERS: dict[str, type[np.generic]] = {
    "half": np.float16,
    "bf16": np.uint16,
    "float": np.float32,
    "byte": np.uint8,
    "signed byte": np.int8,
}


@pytest.fixture(scope="module", params=[1, 2], ids=["one thread", "two threads"])
def library(request: pytest.FixtureRequest) -> Library:
    return load_library(request.param)


def as_described(packed: PackedLinear) -> Tensor:
    """fp64[num_packed, K], read as the comment in layout.h says, in the order in which outputs are packed."""
    assert packed.quantization is not None
    its, output_scales, order, _ = packed.quantization
    name = SCALE_TYPES[its.scale_type]
    stream, at = packed.weight.numpy(), 0
    matrix = np.zeros((packed.num_packed, -(-packed.num_inputs // 32) * 32))

    def take(dtype: type[np.generic], count: int) -> np.ndarray:
        nonlocal at
        found = stream[at : at + count * np.dtype(dtype).itemsize].view(dtype)
        at += found.nbytes
        return found

    def numbers(groups: int) -> np.ndarray:
        assert name is not None
        found = take(NUMBERS[name], 16 * groups).reshape(groups, 16)
        return (found.astype(np.uint32) << 16).view(np.float32) if name == "bf16" else found.astype(np.float64)

    for panel in range(0, packed.num_packed, 16):
        for k in range(0, matrix.shape[1], its.block):
            count = min(its.block, matrix.shape[1] - k)
            groups = -(-count // its.group)
            begin = at
            super_scale = take(np.float16, 16).astype(float) if its.has_super else np.ones(16)
            super_minimum = take(np.float16, 16).astype(float) if its.has_super and its.has_minimums else np.ones(16)
            scales = super_scale * numbers(groups) if name else np.ones((groups, 16))
            zeros = (
                take(np.uint8, 16 * groups).reshape(groups, 16) if its.has_zeros else np.full((groups, 16), its.zero)
            )
            minimums = super_minimum * numbers(groups) if its.has_minimums else np.zeros((groups, 16))
            at += -(at - begin) % 64
            codes, done = np.zeros((count // 4, 64), np.uint8), 0
            while done < its.bits:
                width = next(w for w in (8, 4, 2, 1) if w <= its.bits - done)
                plane = take(np.uint8, 16 * count * width // 8).reshape(-1, 64)
                for i in range(count // 4):
                    of_vector = plane[i // (8 // width)] >> (width * (i % (8 // width))) & ((1 << width) - 1)
                    codes[i] |= of_vector << done
                done += width
            values = np.frombuffer(its.table, np.uint8)[codes] if its.has_table else codes
            columns = values.reshape(-1, 16, 4).transpose(0, 2, 1).reshape(count, 16).astype(float)
            j = np.arange(count) // its.group
            matrix[panel : panel + 16, k : k + count] = (scales[j] * (columns - zeros[j]) - minimums[j]).T
    found = torch.from_numpy(matrix[:, : packed.num_inputs])
    if output_scales is not None:
        found = found * output_scales.double()[:, None]
    ordered = found if order is None else torch.empty_like(found)
    if order is not None:
        ordered[:, order.long()] = found
    return ordered


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("n", "k"), [(35, 640), (64, 515), (130, 100)])
def test_the_layout_is_as_described(library: Library, name: str, n: int, k: int) -> None:
    torch.manual_seed(0)
    weight = LAYOUTS[name](n, k)
    packed = library.pack_quantized(weight, rounds_inputs=True)
    expected = dequantized(weight).double()
    torch.testing.assert_close(as_described(packed)[:n], expected, rtol=1e-6, atol=1e-6)
    if n % 2 == 0:
        both = as_described(library.pack_quantized(weight, interleaved=True, rounds_inputs=True))
        parts = both.view(-1, 2, 16, k).transpose(0, 1).reshape(2, -1, k)[:, : n // 2]
        torch.testing.assert_close(parts.reshape(n, k), expected, rtol=1e-6, atol=1e-6)


def plain_outputs(packed: PackedLinear, found: Tensor) -> Tensor:
    """[T, num_packed] -> [T, N]"""
    if not packed.interleaved:
        return found[:, : packed.num_outputs]
    parts = found.view(len(found), -1, 2, 16).transpose(1, 2).reshape(len(found), 2, -1)
    return parts[..., : packed.num_outputs // 2].flatten(1)


def rounding_of(weight: QuantizedWeight) -> InputRounding:
    return weight.inputs or InputRounding("int8", group=32)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("n", "k"), [(36, 672), (130, 101), (36, 16)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_products_are_those_of_rounded_inputs(library: Library, name: str, n: int, k: int, interleaved: bool) -> None:
    """Integer sums are exact, so only the additions of floats round; and rounding moves inputs by half a step."""
    torch.manual_seed(0)
    weight, bias = LAYOUTS[name](n, k), torch.randn(n)
    packed = library.pack_quantized(weight, bias, interleaved=interleaved, rounds_inputs=True)
    x = torch.randn(9, k) * torch.rand(9, 1)
    x[2] = 0
    ordered = x if weight.order is None else x[:, weight.order]
    inputs = as_floats(round_inputs(ordered, rounding_of(weight))).double()
    matrix = dequantized(weight._replace(order=None)).double()
    found = plain_outputs(packed, native_linear(library, packed, x)).double()
    expected = inputs @ matrix.T + bias
    # What is added: products before zeros and minimums are taken away.
    largest = dequantized(weight._replace(order=None, zeros=0, minimums=None)).abs() + matrix.abs()
    error = 2**-24 * (k / 16 + 4) * (inputs.abs() @ largest.double().T + bias.abs())
    assert bool(((found - expected).abs() <= error).all()), float(((found - expected).abs() / error).max())
    if weight.inputs is None or weight.inputs.scale is None:
        steps = round_inputs(ordered, rounding_of(weight)).scales.repeat_interleave(rounding_of(weight).group or k, 1)
        moved = 0.5001 * steps[:, :k].double() @ matrix.abs().T
        assert bool(((found - ordered.double() @ matrix.T - bias).abs() <= error + moved).all())


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_bits_in_any_batch(library: Library, name: str) -> None:
    torch.manual_seed(0)
    packed = library.pack_quantized(LAYOUTS[name](100, 544), torch.randn(100), rounds_inputs=True)
    x = torch.randn(270, 544)
    expected = torch.cat([native_linear(library, packed, row[None]) for row in x])
    assert not bool(expected.isnan().any())
    for count in (*range(1, 41), 270):
        assert torch.equal(native_linear(library, packed, x[:count]), expected[:count]), count


def test_experts(library: Library) -> None:
    """Each token's are the products of its experts, added; the same bits in any batch."""
    torch.manual_seed(0)
    count, hidden, inner, top_k = 6, 96, 160, 2
    routing = Routing(top_k)
    router = library.pack(torch.randn(count, hidden))
    gate_up, down = (
        [
            library.pack_quantized(LAYOUTS["GPTQ"](*shape), interleaved=interleaved, rounds_inputs=True)
            for _ in range(count)
        ]
        for shape, interleaved in (((2 * inner, hidden), True), ((hidden, inner), False))
    )
    experts = PackedExperts(router, gate_up, down, routing, None, ACTIVATIONS.index("relu"))
    x = torch.randn(40, hidden)
    found = native_experts(library, experts, x)
    for t in (0, 7, 39):
        assert torch.equal(native_experts(library, experts, x[t : t + 1])[0], found[t])
    ids, weights = native_route(library, native_linear(library, router, x)[:, :count], routing)
    for t, (its, by) in enumerate(zip(ids.tolist(), weights, strict=True)):
        expected = torch.zeros(hidden)
        for expert, weight in sorted(zip(its, by, strict=True)):
            both = plain_outputs(gate_up[expert], native_linear(library, gate_up[expert], x[t : t + 1]))
            gate, up = both.chunk(2, dim=1)
            expected += weight * native_linear(library, down[expert], gate.relu() * up)[0, :hidden]
        torch.testing.assert_close(found[t], expected, rtol=1e-5, atol=1e-6)


def test_what_is_no_number_stays_none(library: Library) -> None:
    for name in ("GPTQ", "INT8 W8A8", "Q4_K"):
        torch.manual_seed(0)
        packed = library.pack_quantized(LAYOUTS[name](64, 512), rounds_inputs=True)
        x = torch.randn(3, 512)
        x[1, 77] = torch.nan
        found = native_linear(library, packed, x)
        assert bool(found[1].isnan().all())
        assert not bool(found[[0, 2]].isnan().any())
