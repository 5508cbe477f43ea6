"""Rows of a packed matrix as floats: embeddings."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.quantized.device_weight import DeviceWeight
from penstock.kernels.triton.device import ceil_div
from penstock.kernels.triton.quantized.tiles import weight_arguments, weight_tile


@triton.jit
def quantized_rows_kernel(
    ids_ptr, order_ptr, out_ptr, num_inputs,
    low_ptr, high_ptr, scales_ptr, zeros_ptr, minimums_ptr, super_scales_ptr, super_minimums_ptr, values_ptr,
    low_bytes, high_bytes, num_groups, num_supers,
    LOW: tl.constexpr, HIGH: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, HAS_SUPERS: tl.constexpr, ARE_EXPONENTS: tl.constexpr,
    OUTPUT_SCALES: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Grid (T, ceil(H / BLOCK_K))."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_K
    rows = tl.load(ids_ptr + token + tl.arange(0, 1)).to(tl.int64)
    numbers = weight_tile(
        rows, first, low_ptr, high_ptr, scales_ptr, zeros_ptr, minimums_ptr, super_scales_ptr, super_minimums_ptr,
        values_ptr, low_bytes, high_bytes, num_groups, num_supers, LOW, HIGH, NUMBERS, ZERO, GROUP, HAS_ZEROS,
        HAS_MINIMUMS, HAS_SUPERS, ARE_EXPONENTS, OUTPUT_SCALES, BLOCK_K, EVEN_K,
    )  # fmt: skip
    if OUTPUT_SCALES:
        numbers *= tl.load(scales_ptr + rows)[:, None]
    k = first + tl.arange(0, BLOCK_K)[None, :]
    mask = k < num_inputs
    if HAS_ORDER:
        k = tl.load(order_ptr + k, mask=mask, other=0)
    tl.store(out_ptr + token * num_inputs + k, numbers.to(out_ptr.dtype.element_ty), mask=mask)


def quantized_rows_triton(weight: DeviceWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[V, H], int[T] -> [T, H]."""
    block, num_inputs = 1024, weight.num_inputs
    out = torch.empty((len(ids), num_inputs), dtype=dtype, device=ids.device)
    if len(ids):
        quantized_rows_kernel[(len(ids), ceil_div(num_inputs, block))](
            ids.contiguous(), ids if weight.order is None else weight.order, out, num_inputs,
            **weight_arguments(weight), HAS_ORDER=weight.order is not None, BLOCK_K=block,
            EVEN_K=num_inputs % block == 0, num_warps=4,
        )  # fmt: skip
    return out
