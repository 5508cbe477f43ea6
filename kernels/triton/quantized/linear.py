"""Products with packed matrices: floats times unpacked numbers, or rounded inputs times the codes themselves.

Weights are the rows of a tile's product and tokens its columns, so that unpacked numbers go into it from registers.
With few tokens most of a GPU would be idle. Then an output's inputs are divided among several programs, and another
launch adds up their sums.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.experts.experts import BlockedRows
from penstock.kernels.quantized.device_weight import DeviceWeight
from penstock.kernels.quantized.inputs import RoundedInputs
from penstock.kernels.triton.device import ceil_div, device_facts
from penstock.kernels.triton.quantized.many_rows import (
    MOST_ROWS_OF_CODES,
    MOST_ROWS_OF_PACKED,
    has_product_of_codes,
    product_of_codes,
    product_of_floats,
)
from penstock.kernels.triton.quantized.tiles import (
    WHOLE,
    half_factors,
    half_tile,
    numbers_of,
    of_groups,
    plane_tile,
    weight_arguments,
    weight_tile,
)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def quantized_linear_kernel(
    x_ptr, x_scales_ptr, bias_ptr, row_scales_ptr, rows_ptr, blocks_ptr, out_ptr,
    num_rows, num_blocks, num_outputs, num_inputs, stride_x, stride_xs, split_inputs,
    low_ptr, high_ptr, scales_ptr, zeros_ptr, minimums_ptr, super_scales_ptr, super_minimums_ptr, values_ptr,
    low_bytes, high_bytes, num_groups, num_supers,
    LOW: tl.constexpr, HIGH: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, HAS_SUPERS: tl.constexpr, ARE_EXPONENTS: tl.constexpr,
    OUTPUT_SCALES: tl.constexpr, OF_CODES: tl.constexpr, HALVES: tl.constexpr, WIDE: tl.constexpr,
    HAS_X_SCALES: tl.constexpr,
    X_GROUP: tl.constexpr, ROWS_OF_INPUT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROW_SCALES: tl.constexpr,
    IS_GROUPED: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B * ceil(N / BLOCK_N), splits): BLOCK_N outputs for one block of SIZE rows.

    IS_GROUPED: rows and blocks as in `kernels/triton/experts/experts.py`. OF_CODES: both sides are multiplied as they
    are stored, else in the dtype WIDE. HALVES: how codes of 4 bits get there, as `half_tile` knows it; "": by fp32.
    X_GROUP: inputs of a token that share a scale; 0: all.
    """
    num_tiles = tl.cdiv(num_outputs, BLOCK_N)
    together = TOGETHER * num_tiles
    first_block = tl.program_id(0) // together * TOGETHER
    num_together = tl.minimum(num_blocks - first_block, TOGETHER)
    within = tl.program_id(0) % together
    block = first_block + within % num_together
    if IS_GROUPED:
        begin = tl.load(blocks_ptr + num_blocks + block)
        end = tl.load(blocks_ptr + 2 * num_blocks + block)
        if begin == end:
            return
        expert = tl.load(blocks_ptr + block).to(tl.int64)
        places = begin + tl.arange(0, SIZE)
        has_row = places < end
        rows = tl.load(rows_ptr + places, mask=has_row, other=0).to(tl.int64)
    else:
        expert = tl.full([], 0, tl.int64)
        places = block * SIZE + tl.arange(0, SIZE)
        has_row = places < num_rows
        rows = places.to(tl.int64)
    n = within // num_together * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = n < num_outputs
    outputs = expert * num_outputs + tl.where(is_output, n, 0)
    tokens = rows // ROWS_OF_INPUT
    begin_k = tl.program_id(1) * split_inputs
    end_k = tl.minimum(begin_k + split_inputs, num_inputs)
    OF_SUMS: tl.constexpr = OF_CODES or HALVES == "exact" or HALVES == "bytes" or HALVES == "table"
    GROUP_SCALES: tl.constexpr = OF_SUMS and not OUTPUT_SCALES
    SCALED_SUMS: tl.constexpr = X_GROUP > 0 or GROUP_SCALES
    IS_INT: tl.constexpr = OF_CODES and NUMBERS == "integers"
    CODE: tl.constexpr = tl.int8 if NUMBERS == "integers" else tl.float8e4nv
    FLOAT: tl.constexpr = tl.float32 if WIDE == "fp32" else (tl.float16 if WIDE == "fp16" else tl.bfloat16)
    acc = tl.zeros([BLOCK_N, SIZE], tl.int32 if IS_INT and not SCALED_SUMS else tl.float32)
    k = tl.arange(0, BLOCK_K)
    # What steps need beside the two sides is loaded a step before. (Triton does this for the sides alone.)
    if HALVES != "":
        next_one, next_two = half_factors(
            outputs, begin_k, scales_ptr, zeros_ptr, minimums_ptr, super_scales_ptr, super_minimums_ptr, num_groups,
            num_supers, HALVES, ZERO, GROUP, HAS_ZEROS, HAS_MINIMUMS, HAS_SUPERS, ARE_EXPONENTS, WIDE == "bf16",
            BLOCK_K,
        )  # fmt: skip
    if GROUP_SCALES:
        next_scales = of_groups(
            scales_ptr, super_scales_ptr, outputs, begin_k // GROUP + tl.arange(0, 1), num_groups, num_supers, GROUP,
            HAS_SUPERS, ARE_EXPONENTS,
        )  # fmt: skip
    if X_GROUP > 0:
        next_x_scales = tl.load(x_scales_ptr + tokens * stride_xs + begin_k // X_GROUP, mask=has_row, other=0.0)
    for first in tl.range(begin_k, end_k, BLOCK_K):
        after = first + BLOCK_K
        if HALVES != "":
            one, two = next_one, next_two
            next_one, next_two = half_factors(
                outputs, after, scales_ptr, zeros_ptr, minimums_ptr, super_scales_ptr, super_minimums_ptr, num_groups,
                num_supers, HALVES, ZERO, GROUP, HAS_ZEROS, HAS_MINIMUMS, HAS_SUPERS, ARE_EXPONENTS, WIDE == "bf16",
                BLOCK_K,
            )  # fmt: skip
        if GROUP_SCALES:
            scales = next_scales
            next_scales = of_groups(
                scales_ptr, super_scales_ptr, outputs, after // GROUP + tl.arange(0, 1), num_groups, num_supers, GROUP,
                HAS_SUPERS, ARE_EXPONENTS,
            )  # fmt: skip
        if X_GROUP > 0:
            x_scales = next_x_scales
            group = tl.minimum(after, num_inputs - 1) // X_GROUP
            next_x_scales = tl.load(x_scales_ptr + tokens * stride_xs + group, mask=has_row, other=0.0)
        x_ptrs = x_ptr + (tokens * stride_x)[:, None] + (first + k)[None, :]
        if EVEN_K:
            x = tl.load(x_ptrs, mask=has_row[:, None], other=0)
        else:
            x = tl.load(x_ptrs, mask=has_row[:, None] & (first + k < num_inputs)[None, :], other=0)
        if OF_CODES:
            weight = plane_tile(low_ptr, outputs, first, low_bytes, 8, BLOCK_K, EVEN_K).to(CODE, bitcast=True)
            x = x.to(CODE, bitcast=True)
        elif HALVES != "":
            weight = half_tile(
                one, two, outputs, first, low_ptr, high_ptr, values_ptr, low_bytes, high_bytes, HALVES, HIGH,
                WIDE == "bf16", BLOCK_K, EVEN_K,
            )  # fmt: skip
        else:
            weight = weight_tile(
                outputs, first, low_ptr, high_ptr, scales_ptr, zeros_ptr, minimums_ptr, super_scales_ptr,
                super_minimums_ptr, values_ptr, low_bytes, high_bytes, num_groups, num_supers, LOW, HIGH, NUMBERS,
                ZERO, GROUP, HAS_ZEROS, HAS_MINIMUMS, HAS_SUPERS, ARE_EXPONENTS, OUTPUT_SCALES, BLOCK_K, EVEN_K,
            ).to(FLOAT)  # fmt: skip
            if x_ptr.dtype.element_ty == tl.uint8:
                x = numbers_of(x, x_ptr, 8, "e4m3", 0)
            x = x.to(FLOAT)
        if SCALED_SUMS:
            SUM: tl.constexpr = tl.int32 if IS_INT else tl.float32
            part = tl.dot(weight, tl.trans(x), input_precision=PRECISION, out_dtype=SUM).to(tl.float32)
            if GROUP_SCALES:
                part *= scales
            if X_GROUP > 0:
                part *= x_scales[None, :]
            acc += part
        elif IS_INT:
            acc = tl.dot(weight, tl.trans(x), acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION, max_num_imprecise_acc=BLOCK_K)
    sums = acc.to(tl.float32)
    if HAS_X_SCALES and X_GROUP == 0:
        sums *= tl.load(x_scales_ptr + tokens * stride_xs, mask=has_row, other=0.0)[None, :]
    if OUTPUT_SCALES:
        sums *= tl.load(scales_ptr + outputs)[:, None]
    if HAS_ROW_SCALES:
        sums *= tl.load(row_scales_ptr + rows, mask=has_row, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias_ptr + outputs).to(tl.float32)[:, None]
    out_ptrs = out_ptr + ((tl.program_id(1) * num_rows + rows) * num_outputs)[None, :] + n[:, None]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=has_row[None, :] & is_output[:, None])


@triton.jit
def quantized_vector_kernel(
    x_ptr, bias_ptr, out_ptr, num_outputs, num_inputs, split_inputs,
    low_ptr, high_ptr, scales_ptr, zeros_ptr, minimums_ptr, super_scales_ptr, super_minimums_ptr, values_ptr,
    low_bytes, high_bytes, num_groups, num_supers,
    LOW: tl.constexpr, HIGH: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, HAS_SUPERS: tl.constexpr, ARE_EXPONENTS: tl.constexpr,
    OUTPUT_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(N / BLOCK_N), splits): BLOCK_N outputs of one token, in fp32."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = n < num_outputs
    outputs = tl.where(is_output, n, 0).to(tl.int64)
    begin_k = tl.program_id(1) * split_inputs
    end_k = tl.minimum(begin_k + split_inputs, num_inputs)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    k = tl.arange(0, BLOCK_K)
    for first in tl.range(begin_k, end_k, BLOCK_K, num_stages=3):
        x = tl.load(x_ptr + first + k, mask=first + k < num_inputs, other=0.0)
        weight = weight_tile(
            outputs, first, low_ptr, high_ptr, scales_ptr, zeros_ptr, minimums_ptr, super_scales_ptr,
            super_minimums_ptr, values_ptr, low_bytes, high_bytes, num_groups, num_supers, LOW, HIGH, NUMBERS,
            ZERO, GROUP, HAS_ZEROS, HAS_MINIMUMS, HAS_SUPERS, ARE_EXPONENTS, OUTPUT_SCALES, BLOCK_K, EVEN_K,
        )  # fmt: skip
        acc += weight * x.to(tl.float32)[None, :]
    sums = tl.sum(acc, 1)
    if OUTPUT_SCALES:
        sums *= tl.load(scales_ptr + outputs)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + tl.program_id(1) * num_outputs + n
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=is_output)


# The number of rows varies from step to step.
@triton.jit(do_not_specialize=["splits", "num_rows"])
def sum_of_splits_kernel(
    parts_ptr, bias_ptr, out_ptr, splits, num_rows, width, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (T, ceil(N / BLOCK)): adds the sums in the order of the splits."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.range(0, splits):
        total += tl.load(parts_ptr + (split * num_rows + row) * width + cols, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + cols, total.to(out_ptr.dtype.element_ty), mask=mask)


class Tiles(NamedTuple):
    """The tiles of a launch."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def quantized_linear_triton(
    x: Tensor | RoundedInputs, weight: DeviceWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[T, K], in the weight's order of inputs, -> [T, N] of `dtype`."""
    codes = x if isinstance(x, Tensor) else x.codes
    num_rows, num_outputs = codes.shape[0], weight.num_outputs
    if num_rows > MOST_ROWS_OF_CODES and not isinstance(x, Tensor) and has_product_of_codes(x, weight, dtype):
        return product_of_codes(x, weight, bias, dtype)
    out = torch.empty((num_rows, num_outputs), dtype=dtype, device=codes.device)
    if not num_rows:
        return out
    if num_rows > MOST_ROWS_OF_PACKED and isinstance(x, Tensor):
        product_of_floats(x, weight, bias, out)
        return out
    size = 16 if num_rows <= 16 else 64 if num_rows <= 64 else 128  # warm-up runs all of them
    # One row's products with bytes, or with looked-up values, take no more instructions than tiles of them do.
    is_vector = num_rows == 1 and isinstance(x, Tensor) and halves_of(x, weight, dtype) in ("", "bytes", "table")
    tiles = VECTOR if is_vector else choose_tiles(x, weight, size, dtype)
    splits, split_inputs = choose_splits(weight, tiles, ceil_div(num_rows, size))
    target = out if splits == 1 else torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)
    its_bias = bias if splits == 1 else None
    if is_vector:
        quantized_vector_kernel[(ceil_div(num_outputs, tiles.block_n), splits)](
            codes.contiguous(), codes if its_bias is None else its_bias, target, num_outputs, weight.num_inputs,
            split_inputs, **weight_arguments(weight), HAS_BIAS=its_bias is not None, BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k, EVEN_K=weight.num_inputs % tiles.block_k == 0, num_warps=tiles.num_warps,
        )  # fmt: skip
    else:
        arguments = linear_arguments(x, weight, its_bias, target, dtype, tiles)
        num_blocks = ceil_div(num_rows, size)
        quantized_linear_kernel[(num_blocks * ceil_div(num_outputs, tiles.block_n), splits)](
            **arguments, row_scales_ptr=out, rows_ptr=out, blocks_ptr=out, num_rows=num_rows,
            num_blocks=num_blocks, split_inputs=split_inputs, ROWS_OF_INPUT=1, HAS_ROW_SCALES=False,
            IS_GROUPED=False, SIZE=size,
        )  # fmt: skip
    if splits > 1:
        sum_of_splits_kernel[(num_rows, ceil_div(num_outputs, 1024))](
            target, target if bias is None else bias, out, splits, num_rows, num_outputs,
            HAS_BIAS=bias is not None, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out


def grouped_quantized_linear_triton(
    x: Tensor | RoundedInputs,
    grouped: BlockedRows,
    weight: DeviceWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    of_tokens: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    """[T * k, K] or [T, K], in the weight's order of inputs, -> [T * k, N] of `dtype`; see the torch function."""
    num_rows, num_blocks = grouped.rows.shape[0], grouped.blocks.shape[1]
    out = torch.empty((num_rows, weight.num_outputs), dtype=dtype, device=grouped.rows.device)
    if num_rows:
        tiles = choose_tiles(x, weight, grouped.size, dtype)
        quantized_linear_kernel[(num_blocks * ceil_div(weight.num_outputs, tiles.block_n), 1)](
            **linear_arguments(x, weight, bias, out, dtype, tiles),
            row_scales_ptr=out if scales is None else scales, rows_ptr=grouped.rows, blocks_ptr=grouped.blocks,
            num_rows=num_rows, num_blocks=num_blocks, split_inputs=WHOLE,
            ROWS_OF_INPUT=grouped.top_k if of_tokens else 1, HAS_ROW_SCALES=scales is not None, IS_GROUPED=True,
            SIZE=grouped.size,
        )  # fmt: skip
    return out


def linear_arguments(
    x: Tensor | RoundedInputs,
    weight: DeviceWeight,
    bias: Tensor | None,
    out: Tensor,
    dtype: torch.dtype,
    tiles: Tiles,
) -> dict[str, Any]:
    """The arguments of `quantized_linear_kernel` that do not concern rows."""
    codes = x if isinstance(x, Tensor) else x.codes
    codes = codes if codes.stride(1) == 1 else codes.contiguous()
    codes = codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes
    x_scales, x_group, stride_xs = codes, 0, 0
    if isinstance(x, RoundedInputs):
        x_scales, x_group = x.scales, 0 if x.scales.shape[1] == 1 else x.group
        stride_xs = 0 if x.scales.shape[0] == 1 else x.scales.stride(0)  # all rows share a static scale
    halves = halves_of(x, weight, dtype)
    arguments = weight_arguments(weight)
    if halves == "table":
        assert weight.value_bytes is not None
        arguments["values_ptr"] = weight.value_bytes[:8] if dtype == torch.bfloat16 else weight.value_bytes[8:]
    return {
        "x_ptr": codes,
        "x_scales_ptr": x_scales,
        "bias_ptr": codes if bias is None else bias,
        "out_ptr": out,
        "num_outputs": weight.num_outputs,
        "num_inputs": weight.num_inputs,
        "stride_x": codes.stride(0),
        "stride_xs": stride_xs,
        **arguments,
        "OF_CODES": multiplies_codes(x, weight),
        "HALVES": halves,
        "WIDE": {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype],
        "HAS_X_SCALES": isinstance(x, RoundedInputs),
        "X_GROUP": x_group,
        "HAS_BIAS": bias is not None,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "TOGETHER": 8,
        "EVEN_K": weight.num_inputs % tiles.block_k == 0,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def multiplies_codes(x: Tensor | RoundedInputs, weight: DeviceWeight) -> bool:
    """Whether the GPU multiplies both sides as they are stored: bytes of one kind, with scales applied to the sums."""
    if isinstance(x, Tensor) or isinstance(weight.zeros, Tensor) or weight.zeros or weight.minimums is not None:
        return False
    if weight.scales.shape[-1] > 1 and weight.group < LEAST_OF_CODES:
        return False
    if x.codes.dtype == torch.int8:
        return weight.planes[0].dtype == torch.int8
    return weight.numbers == "e4m3" and device_facts(weight.device).capability >= (8, 9)


def halves_of(x: Tensor | RoundedInputs, weight: DeviceWeight, dtype: torch.dtype) -> str:
    """How codes become half precision; see `half_tile`. Empty if it takes more steps."""
    if not isinstance(x, Tensor) or dtype == torch.float32:
        return ""
    is_plain = weight.minimums is None and weight.super_scales is None
    is_of_sums = is_plain and (weight.has_output_scales or weight.group >= LEAST_OF_SUMS)
    is_of_words = weight.scales.shape[-1] > 1 and weight.group >= LEAST_OF_WORDS
    if weight.numbers == "integers":
        if weight.bits == 8:
            are_words = isinstance(weight.zeros, int) and weight.zeros == 0 and weight.num_inputs % 16 == 0
            return "bytes" if is_of_sums and are_words else ""
        if weight.bits == 4 and is_of_sums:
            return "exact"
        return "scaled" if weight.bits >= 4 and is_of_words else ""
    if weight.value_bytes is not None and isinstance(weight.zeros, int) and weight.zeros == 0:
        return "table" if is_of_sums else ""
    are_exponents = weight.scales.dtype == torch.uint8 and is_plain
    return "e2m1" if weight.numbers == "e2m1" and are_exponents and is_of_words and dtype == torch.bfloat16 else ""


LEAST_OF_SUMS = 64
"""Inputs that share a scale, if it is applied to their sum."""
LEAST_OF_WORDS = 8
"""Inputs that share a scale, if it is applied to words."""
LEAST_OF_CODES = 32
"""Bytes of each row that a matrix instruction takes at once."""
VECTOR = Tiles(16, 256, 4, 1)


def choose_tiles(x: Tensor | RoundedInputs, weight: DeviceWeight, size: int, dtype: torch.dtype) -> Tiles:
    """The tiles. With few rows, reading the matrix takes most of the time, and many small programs read in parallel."""
    of_codes = multiplies_codes(x, weight)
    halves = halves_of(x, weight, dtype)
    block_n, block_k, num_warps, num_stages = (64, 128, 4, 4) if size == 16 else (128, 64, 8, 3)
    if halves:
        # Other GPUs than Hopper need registers for the inputs, too.
        is_large = device_facts(weight.device).is_large
        block_n, block_k, num_warps, num_stages = {
            16: (64, 128, 4, 4),
            64: (128 if is_large else 64, 64, 4, 3),  # GPTQ on an H100: 71 us, with (64, 128) 97; others not swept
            128: (128, 64 if is_large else 32, 8, 3),
        }[size]
        if halves in ("exact", "bytes", "table") and not weight.has_output_scales and weight.group < block_k:
            # As many numbers for each thread, so that what a step costs beside them matters less.
            block_n, block_k = 128, weight.group
        return Tiles(block_n, block_k, num_warps, num_stages)
    if of_codes:
        block_k = 128
    elif dtype == torch.float32:
        block_k = 32
    # If each step's sums have scales of their own, they are kept beside the total.
    if isinstance(x, RoundedInputs) and x.scales.shape[1] > 1:
        block_n, block_k = 64, min(block_k if of_codes else 64, x.group)
    elif size == 128 and not (of_codes or weight.has_output_scales) and not device_facts(weight.device).is_large:
        # Unpacked numbers, their scales and the inputs are all in registers.
        block_n, block_k, num_warps = 64, 32, 4
    if of_codes and not weight.has_output_scales:
        block_n, block_k = 64, min(block_k, weight.group)
    return Tiles(block_n, block_k, num_warps, num_stages)


def choose_splits(weight: DeviceWeight, tiles: Tiles, num_blocks: int) -> tuple[int, int]:
    """(programs that share an output, inputs of each): enough for two programs a multiprocessor, with four steps each.

    The result is the same for all numbers of rows that fit in one block.
    """
    steps = ceil_div(weight.num_inputs, tiles.block_k)
    num_programs = num_blocks * ceil_div(weight.num_outputs, tiles.block_n)
    wanted = 2 * device_facts(weight.device).num_sms // num_programs
    of_each = ceil_div(steps, max(1, min(wanted, steps // 4, 16)))
    return ceil_div(steps, of_each), of_each * tiles.block_k
