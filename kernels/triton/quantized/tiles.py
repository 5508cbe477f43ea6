"""Tiles of a packed matrix as numbers, for every product with it; see `penstock.kernels.quantized.device_weight`.

Kernels take a matrix as the arguments of `weight_arguments`, and hand them to `weight_tile`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.quantized.device_weight import PLANES, DeviceWeight
from penstock.kernels.triton.quantized.nibbles import (
    e2m1,
    in_order,
    integers,
    pairs_of,
    scaled,
    scales_of,
    signed_bytes,
    table,
    words_tile,
)

WHOLE = 1 << 30
"""The group size that stands for all inputs."""


@triton.jit
def plane_tile(plane_ptr, rows, first, row_bytes, BITS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """uint8[N, BLOCK_K] (int8 if the plane is int8): the bits of inputs from `first` on, a multiple of BLOCK_K.

    Each byte is read once, and its parts become adjacent in the same thread. Planes of 4 bits are read by words, and
    the result is int32.
    """
    if BITS == 4:
        words = words_tile(plane_ptr, rows, first, row_bytes, 8, BLOCK_K, EVEN_K)
        parts = in_order((
            words & 15, (words >> 16) & 15, (words >> 4) & 15, (words >> 20) & 15,
            (words >> 8) & 15, (words >> 24) & 15, (words >> 12) & 15, (words >> 28) & 15,
        ))  # fmt: skip
    else:
        at = first * BITS // 8 + tl.arange(0, BLOCK_K * BITS // 8)
        ptrs = plane_ptr + rows[:, None] * row_bytes + at[None, :]
        parts = tl.load(ptrs) if EVEN_K else tl.load(ptrs, mask=at[None, :] < row_bytes, other=0)
        # The index of the outer join is the last in the new shape, so it is the lowest bits of the place.
        if BITS == 2:
            parts = tl.join(tl.join(parts & 3, (parts >> 4) & 3), tl.join((parts >> 2) & 3, parts >> 6))
        elif BITS == 1:
            even = tl.join(tl.join(parts & 1, (parts >> 4) & 1), tl.join((parts >> 2) & 1, (parts >> 6) & 1))
            odd = tl.join(tl.join((parts >> 1) & 1, (parts >> 5) & 1), tl.join((parts >> 3) & 1, parts >> 7))
            parts = tl.join(even, odd)
    return tl.reshape(parts, [rows.shape[0], BLOCK_K])


@triton.jit
def numbers_of(codes, values_ptr, BITS: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr):
    """fp32: the numbers for codes, minus the zero that all share."""
    if NUMBERS == "integers":
        # 2**23 + code has the bits of both side by side. This takes half as long as a conversion.
        OFFSET: tl.constexpr = 8388608 + ZERO + (128 if codes.dtype == tl.int8 else 0)
        if codes.dtype == tl.int8:
            codes = codes.to(tl.uint8, bitcast=True) ^ 128
        numbers = (codes.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - OFFSET
    elif NUMBERS == "table":
        values = tl.load(values_ptr + tl.arange(0, 1 << BITS))
        flat = tl.reshape(codes, [codes.shape[0] * codes.shape[1]]).to(tl.int32)
        numbers = tl.reshape(tl.gather(values, flat, 0), codes.shape) - ZERO
    else:  # the bits are those of fp16, apart from the exponent's bias
        SIGN: tl.constexpr = 1 << (BITS - 1)
        PLACE: tl.constexpr = 7 if NUMBERS == "e4m3" else 9  # of the lowest bit of the mantissa
        BIAS: tl.constexpr = 256.0 if NUMBERS == "e4m3" else 16384.0
        bits = codes.to(tl.uint16)
        bits = ((bits & (SIGN - 1)) << PLACE) | ((bits & SIGN) << (16 - BITS))
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32) * BIAS - ZERO
    return numbers


@triton.jit
def of_groups(
    ptr, super_ptr, rows, group, num_groups, num_supers,
    GROUP: tl.constexpr, HAS_SUPERS: tl.constexpr, ARE_EXPONENTS: tl.constexpr,
):  # fmt: skip
    """fp32[N, G]: scales, minimums or zeros of groups."""
    numbers = tl.load(ptr + rows[:, None] * num_groups + group[None, :], mask=group[None, :] < num_groups, other=0)
    exponents = numbers.to(tl.uint32) << 23
    numbers = exponents.to(tl.float32, bitcast=True) if ARE_EXPONENTS else numbers.to(tl.float32)
    if HAS_SUPERS:
        above = group * GROUP // 256
        of_supers = tl.load(
            super_ptr + rows[:, None] * num_supers + above[None, :], mask=above[None, :] < num_supers, other=0.0
        )
        numbers *= of_supers.to(tl.float32)
    return numbers


@triton.jit
def weight_tile(
    rows, first, low_ptr, high_ptr, scales_ptr, zeros_ptr, minimums_ptr, super_scales_ptr, super_minimums_ptr,
    values_ptr, low_bytes, high_bytes, num_groups, num_supers,
    LOW: tl.constexpr, HIGH: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, HAS_SUPERS: tl.constexpr, ARE_EXPONENTS: tl.constexpr,
    OUTPUT_SCALES: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """fp32[N, BLOCK_K]: outputs `rows` and inputs from `first` on. OUTPUT_SCALES are applied to the sum later."""
    codes = plane_tile(low_ptr, rows, first, low_bytes, LOW, BLOCK_K, EVEN_K)
    if HIGH > 0:
        codes |= plane_tile(high_ptr, rows, first, high_bytes, HIGH, BLOCK_K, EVEN_K).to(codes.dtype) << LOW
    numbers = numbers_of(codes, values_ptr, LOW + HIGH, NUMBERS, ZERO)
    if not OUTPUT_SCALES:
        SIZE: tl.constexpr = GROUP if GROUP < BLOCK_K else BLOCK_K
        group = first // GROUP + tl.arange(0, BLOCK_K // SIZE)
        scales = of_groups(
            scales_ptr, super_scales_ptr, rows, group, num_groups, num_supers, GROUP, HAS_SUPERS, ARE_EXPONENTS
        )
        numbers = tl.reshape(numbers, [rows.shape[0], BLOCK_K // SIZE, SIZE])
        if HAS_ZEROS:
            zeros = of_groups(zeros_ptr, zeros_ptr, rows, group, num_groups, 0, GROUP, False, False)
            numbers -= zeros[:, :, None]
        numbers *= scales[:, :, None]
        if HAS_MINIMUMS:
            minimums = of_groups(
                minimums_ptr, super_minimums_ptr, rows, group, num_groups, num_supers, GROUP, HAS_SUPERS, False
            )
            numbers -= minimums[:, :, None]
        numbers = tl.reshape(numbers, [rows.shape[0], BLOCK_K])
    return numbers


@triton.jit
def half_factors(
    rows, first, scales_ptr, zeros_ptr, minimums_ptr, super_scales_ptr, super_minimums_ptr, num_groups, num_supers,
    HALVES: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr, HAS_SUPERS: tl.constexpr, ARE_EXPONENTS: tl.constexpr, IS_BF16: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """int32[N, G], twice: what `half_tile` makes numbers with; the same if it is one thing. Past the end it is any."""
    SIZE: tl.constexpr = GROUP if GROUP < BLOCK_K else BLOCK_K
    group = first // GROUP + tl.arange(0, BLOCK_K // SIZE)
    if HALVES == "e2m1":
        at = rows[:, None] * num_groups + group[None, :]
        one = scales_of(tl.load(scales_ptr + at, mask=group[None, :] < num_groups, other=0))
        two = one
    elif HALVES == "scaled":
        scales = of_groups(
            scales_ptr, super_scales_ptr, rows, group, num_groups, num_supers, GROUP, HAS_SUPERS, ARE_EXPONENTS
        )
        if HAS_ZEROS:
            zeros = of_groups(zeros_ptr, zeros_ptr, rows, group, num_groups, 0, GROUP, False, False)
            summands = scales * (-128.0 - zeros)
        else:
            summands = scales * (-128.0 - ZERO)
        if HAS_MINIMUMS:
            summands -= of_groups(
                minimums_ptr, super_minimums_ptr, rows, group, num_groups, num_supers, GROUP, HAS_SUPERS, False
            )
        one, two = scales.to(tl.int32, bitcast=True), summands.to(tl.int32, bitcast=True)
    elif HALVES == "exact" and HAS_ZEROS:
        at = rows[:, None] * num_groups + group[None, :]
        one = pairs_of(tl.load(zeros_ptr + at, mask=group[None, :] < num_groups, other=0), IS_BF16)
        two = one
    else:
        one = pairs_of(tl.full([rows.shape[0], 1], ZERO, tl.int32), IS_BF16)
        two = one
    return one, two


@triton.jit
def half_tile(
    one, two, rows, first, low_ptr, high_ptr, values_ptr, low_bytes, high_bytes,
    HALVES: tl.constexpr, HIGH: tl.constexpr, IS_BF16: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """bf16 or fp16 [N, BLOCK_K]: numbers as `HALVES` says, outputs `rows` and inputs from `first` on.

    HALVES: "exact", integers of 4 bits minus zeros, whose scales are applied to sums; so a tile has a single group.
    "bytes", the same for integers of 8 bits without zeros; "table", for values whose bytes are at `values_ptr`.
    "scaled", integers of 4 to 6 bits and of any groups. "e2m1", floats of any groups whose scales are exponents. `one`
    and `two` are from `half_factors`.
    """
    words = words_tile(low_ptr, rows, first, low_bytes, 4 if HALVES == "bytes" else 8, BLOCK_K, EVEN_K)
    if HALVES == "bytes":
        halves = signed_bytes(words, IS_BF16)
        ordered = tl.join(tl.join(halves[0], halves[2]), tl.join(halves[1], halves[3]))
    elif HALVES == "table":
        ordered = in_order(table(words, values_ptr))
    elif HALVES == "exact":
        ordered = in_order(integers(words, of_words(one, words), IS_BF16))
    elif HALVES == "e2m1":
        ordered = in_order(e2m1(words, of_words(one, words)))
    else:
        high = words
        if HIGH > 0:
            high = high_tile(high_ptr, rows, first, high_bytes, HIGH, BLOCK_K, EVEN_K)
        ordered = in_order(scaled(words, high, of_words(one, words), of_words(two, words), HIGH, IS_BF16))
    numbers = tl.reshape(ordered, [rows.shape[0], BLOCK_K])
    return numbers.to(tl.bfloat16 if IS_BF16 else tl.float16, bitcast=True)


@triton.jit
def high_tile(plane_ptr, rows, first, row_bytes, BITS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """int32[N, BLOCK_K / 8]: 1 or 2 bits of each of eight inputs, for the words of a plane of 4 bits."""
    at = first // 8 + tl.arange(0, BLOCK_K // 8)
    ptrs = plane_ptr.to(tl.pointer_type(tl.uint16 if BITS == 2 else tl.uint8))
    ptrs = ptrs + rows[:, None] * (row_bytes // BITS) + at[None, :]
    bits = tl.load(ptrs) if EVEN_K else tl.load(ptrs, mask=at[None, :] < row_bytes // BITS, other=0)
    return bits.to(tl.int32)


@triton.jit
def of_words(numbers, words):
    """[N, W]: numbers of groups [N, G] for the words of each."""
    N: tl.constexpr = words.shape[0]
    EACH: tl.constexpr = words.shape[1] // numbers.shape[1]
    return tl.reshape(tl.broadcast_to(numbers[:, :, None], [N, numbers.shape[1], EACH]), [N, words.shape[1]])


def weight_arguments(weight: DeviceWeight) -> dict[str, Any]:
    """A matrix as keyword arguments of kernels. Some other tensor stands for a missing one."""
    low, high = weight.planes[0], weight.planes[-1]
    bits = PLANES[weight.bits]
    zeros, scales, has_supers = weight.zeros, weight.scales, weight.super_scales is not None

    def or_any(its: Tensor | int | None) -> Tensor:
        return its if isinstance(its, Tensor) else low

    return {
        "low_ptr": low,
        "high_ptr": high,
        "scales_ptr": scales,
        "zeros_ptr": or_any(zeros),
        "minimums_ptr": or_any(weight.minimums),
        "super_scales_ptr": or_any(weight.super_scales),
        "super_minimums_ptr": or_any(weight.super_minimums),
        "values_ptr": or_any(weight.values),
        "low_bytes": low.shape[-1],
        "high_bytes": high.shape[-1],
        "num_groups": scales.shape[-1],
        "num_supers": 0 if weight.super_scales is None else weight.super_scales.shape[-1],
        "LOW": bits[0],
        "HIGH": sum(bits[1:]),
        "NUMBERS": weight.numbers,
        "ZERO": zeros if isinstance(zeros, int) else 0,
        "GROUP": WHOLE if scales.shape[-1] == 1 else weight.group,
        "HAS_ZEROS": isinstance(zeros, Tensor),
        "HAS_MINIMUMS": weight.minimums is not None,
        "HAS_SUPERS": has_supers,
        "ARE_EXPONENTS": scales.dtype == torch.uint8 and not has_supers,
        "OUTPUT_SCALES": weight.has_output_scales,
    }
