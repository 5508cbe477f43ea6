"""Grouped products of experts: one launch sorts all rows by expert, one multiplies them block by block.

A block has up to `size` rows of one expert, and the expert's matrix is read once for all of them. The host need not
know the number of blocks or their places: the table has room for the largest possible number (see `num_blocks`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.experts.experts import BlockedRows
from penstock.kernels.triton.device import ceil_div, device_facts


# The number of rows varies from step to step.
@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def group_rows_kernel(
    ids_ptr, rows_ptr, blocks_ptr, num_rows, num_blocks, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr
):
    """Grid (E,): each program finds an expert's rows, and fills its part of the table of blocks.

    If f rows come before those of expert e, the expert's part begins at f // SIZE + min(e, f), and ends where the next
    one begins. That is enough room for its blocks, and no program needs to know how many blocks another expert has.
    """
    expert = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], tl.int32)
    same = tl.zeros([BLOCK], tl.int32)
    for done in tl.range(0, num_rows, BLOCK):
        ids = tl.load(ids_ptr + done + offs, mask=done + offs < num_rows, other=2147483647)
        lower += (ids < expert).to(tl.int32)
        same += (ids == expert).to(tl.int32)
    begin = tl.sum(lower, 0)
    end = begin + tl.sum(same, 0)
    place = begin
    if end > begin:
        for done in tl.range(0, num_rows, BLOCK):
            ids = tl.load(ids_ptr + done + offs, mask=done + offs < num_rows, other=2147483647)
            is_own = (ids == expert).to(tl.int32)
            tl.store(rows_ptr + place + tl.cumsum(is_own, 0) - 1, done + offs, mask=is_own > 0)
            place += tl.sum(is_own, 0)
    first = begin // SIZE + tl.minimum(expert, begin)
    after = end // SIZE + tl.minimum(expert + 1, end)
    for done in tl.range(first, after, BLOCK_B):
        block = done + tl.arange(0, BLOCK_B)
        from_place = tl.minimum(begin + (block - first) * SIZE, end)
        mask = block < after
        tl.store(blocks_ptr + block, expert, mask=mask)
        tl.store(blocks_ptr + num_blocks + block, from_place, mask=mask)
        tl.store(blocks_ptr + 2 * num_blocks + block, tl.minimum(from_place + SIZE, end), mask=mask)


@triton.jit(do_not_specialize=["num_blocks"])
def grouped_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    scales_ptr,
    rows_ptr,
    blocks_ptr,
    out_ptr,
    num_blocks,
    num_outputs,
    num_inputs,
    stride_x,
    ROWS_OF_INPUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (B * ceil(N / BLOCK_N),): one block of rows by BLOCK_N outputs.

    Programs of TOGETHER neighbouring blocks, mostly of one expert, are consecutive, so the matrix stays in the cache.
    """
    num_tiles = tl.cdiv(num_outputs, BLOCK_N)
    together = TOGETHER * num_tiles
    first_block = tl.program_id(0) // together * TOGETHER
    num_together = tl.minimum(num_blocks - first_block, TOGETHER)
    within = tl.program_id(0) % together
    block = first_block + within % num_together
    begin = tl.load(blocks_ptr + num_blocks + block)
    end = tl.load(blocks_ptr + 2 * num_blocks + block)
    if begin == end:
        return
    expert = tl.load(blocks_ptr + block).to(tl.int64)
    places = begin + tl.arange(0, SIZE)
    has_row = places < end
    rows = tl.load(rows_ptr + places, mask=has_row, other=0).to(tl.int64)
    n = within // num_together * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = n < num_outputs
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (rows // ROWS_OF_INPUT * stride_x)[:, None] + k[None, :]
    of_outputs = (expert * num_outputs + tl.where(is_output, n, 0)) * num_inputs
    weight_ptrs = weight_ptr + of_outputs[None, :] + k[:, None]
    acc = tl.zeros([SIZE, BLOCK_N], tl.float32)
    for done in tl.range(0, num_inputs, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=has_row[:, None], other=0.0)
            weight = tl.load(weight_ptrs)
        else:
            is_input = k < num_inputs - done
            x = tl.load(x_ptrs, mask=has_row[:, None] & is_input[None, :], other=0.0)
            weight = tl.load(weight_ptrs, mask=is_input[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    if HAS_SCALES:
        acc *= tl.load(scales_ptr + rows, mask=has_row, other=0.0)[:, None]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * num_outputs + n, mask=is_output, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    out_ptrs = out_ptr + (rows * num_outputs)[:, None] + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=has_row[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=["num_experts"])
def sum_of_experts_kernel(
    x_ptr,
    weights_ptr,
    experts_ptr,
    out_ptr,
    width,
    num_experts,
    TOP_K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    ARE_SOME: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T, ceil(H / BLOCK)). ARE_SOME: rows of experts from `num_experts` on were not computed."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        row = token * TOP_K + j
        its = mask
        if ARE_SOME:
            its = cols < tl.where(tl.load(experts_ptr + row) < num_experts, width, 0)
        x = tl.load(x_ptr + row * width + cols, mask=its, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            x *= tl.load(weights_ptr + row)
        total += x
    tl.store(out_ptr + token * width + cols, total.to(out_ptr.dtype.element_ty), mask=mask)


def num_blocks(num_rows: int, num_experts: int, size: int) -> int:
    """Places in the table of blocks; see `group_rows_kernel`."""
    return num_rows // size + min(num_experts, num_rows)


def group_rows_triton(ids: Tensor, num_experts: int, *, are_some: bool = False) -> BlockedRows:
    """Arguments as `penstock.kernels.experts.experts.group_rows`."""
    num_tokens, top_k = ids.shape
    num_rows = num_tokens * top_k
    # Larger blocks read a matrix less often, but multiply more padding. Warm-up relies on bounds that are a factor of
    # four apart.
    size = 16 if num_rows <= 16 * num_experts else 64 if num_rows <= 64 * num_experts else 128
    places = num_blocks(num_rows, num_experts, size)
    rows = torch.empty(num_rows, dtype=torch.int32, device=ids.device)
    # Rows of other ranks come last. Their part of the table would be after the others, and has no blocks.
    blocks = (torch.zeros if are_some else torch.empty)((3, places), dtype=torch.int32, device=ids.device)
    ids = ids.contiguous()
    if num_rows:
        group_rows_kernel[(num_experts,)](
            ids, rows, blocks, num_rows, places,
            SIZE=size, BLOCK=512 if size == 16 else 4096, BLOCK_B=128, num_warps=4 if size == 16 else 8,
        )  # fmt: skip
    return BlockedRows(top_k, rows, blocks, size, ids if are_some else None, num_experts)


def grouped_linear_triton(
    x: Tensor,
    grouped: BlockedRows,
    weight: Tensor,
    bias: Tensor | None,
    *,
    of_tokens: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    """Arguments as `penstock.kernels.experts.experts.grouped_linear`."""
    num_rows, places = grouped.rows.shape[0], grouped.blocks.shape[1]
    _, num_outputs, num_inputs = weight.shape
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    is_fp32 = x.dtype == torch.float32
    # With few rows, reading the matrices takes most of the time, and many small programs read them in parallel.
    block_n, block_k, num_warps, num_stages = (64, 128, 4, 4) if grouped.size == 16 else (128, 64, 4, 4)
    if grouped.size == 128:
        num_warps, num_stages = 8, 3
        # On Hopper, tiles of 128 x 128 read shared memory as long as they multiply.
        if device_facts(x.device).is_large and not is_fp32:
            block_n = 256
    if is_fp32 or num_inputs % block_k:
        block_k //= 2
    grid = (places * ceil_div(num_outputs, block_n),)
    grouped_linear_kernel[grid](
        x, weight, weight if bias is None else bias, weight if scales is None else scales, grouped.rows,
        grouped.blocks, out, places, num_outputs, num_inputs, x.stride(0),
        ROWS_OF_INPUT=grouped.top_k if of_tokens else 1, HAS_BIAS=bias is not None, HAS_SCALES=scales is not None,
        SIZE=grouped.size, BLOCK_N=block_n, BLOCK_K=block_k, TOGETHER=8, EVEN_K=num_inputs % block_k == 0,
        PRECISION="ieee" if is_fp32 else "tf32", num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


def sum_of_experts_triton(x: Tensor, grouped: BlockedRows, weights: Tensor | None) -> Tensor:
    """Arguments as `penstock.kernels.experts.experts.sum_of_experts`."""
    num_tokens, width, experts = x.shape[0] // grouped.top_k, x.shape[1], grouped.experts
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if num_tokens:
        sum_of_experts_kernel[(num_tokens, ceil_div(width, 1024))](
            x, x if weights is None else weights, x if experts is None else experts, out, width, grouped.num_experts,
            TOP_K=grouped.top_k, HAS_WEIGHTS=weights is not None, ARE_SOME=experts is not None, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out
