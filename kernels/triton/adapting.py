"""What rows add to products, B (A x), of two narrow matrices that differ from row to row: two launches a product.

Tokens are grouped by the slot that their row has, as rows are by expert: a block has some tokens of one slot, whose
matrices are read once for all of them. Where a slot's matrices are, and how many rows they have, is read on the device.
So no launch depends on which rows have adapters, or on their ranks, and a captured graph serves any.

(Chen et al., "Punica: Multi-Tenant LoRA Serving", 2023, arXiv:2310.18547.)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.experts.experts import BlockedRows
from penstock.kernels.triton.device import ceil_div, next_power_of_two
from penstock.kernels.triton.experts.experts import group_rows_triton

_BLOCK_N = 64


# The number of rows varies from step to step.
@triton.jit(do_not_specialize=["num_slots"])
def slots_of_tokens_kernel(rows_ptr, starts_ptr, slots_ptr, out_ptr, num_slots, BLOCK: tl.constexpr):
    """Grid (N, programs per row). A row without a slot counts as one of slot `num_slots`."""
    b = tl.program_id(0)
    begin = tl.load(starts_ptr + b)
    end = tl.load(starts_ptr + b + 1)
    slot = tl.load(slots_ptr + tl.load(rows_ptr + b))
    slot = tl.where(slot < 0, num_slots, slot)
    step = tl.num_programs(1) * BLOCK
    for done in tl.range(begin + tl.program_id(1) * BLOCK, end, step):
        offs = done + tl.arange(0, BLOCK)
        tl.store(out_ptr + offs, tl.zeros([BLOCK], tl.int32) + slot, mask=offs < end)


# The number of blocks follows from that of tokens, and the tables of a product begin anywhere in those of all.
@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["addresses_ptr", "ranks_ptr"])
def shrink_kernel(
    x_ptr,
    addresses_ptr,
    ranks_ptr,
    rows_ptr,
    blocks_ptr,
    inner_ptr,
    num_blocks,
    num_inputs,
    stride_x,
    stride_slot,
    NUM_SEGMENTS: tl.constexpr,
    MOST_RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (B, segments * ceil(MOST_RANK / BLOCK_R)): inner [T, segments, MOST_RANK] = A x."""
    block = tl.program_id(0)
    begin = tl.load(blocks_ptr + num_blocks + block)
    end = tl.load(blocks_ptr + 2 * num_blocks + block)
    if begin == end:
        return
    tiles = tl.cdiv(MOST_RANK, BLOCK_R)
    segment = tl.program_id(1) // tiles
    first = tl.program_id(1) % tiles * BLOCK_R
    entry = tl.load(blocks_ptr + block).to(tl.int64) * stride_slot + segment
    rank = tl.load(ranks_ptr + entry)
    if first >= rank:
        return
    a_ptr = tl.load(addresses_ptr + 2 * entry).to(x_ptr.dtype)
    places = begin + tl.arange(0, SIZE)
    has_token = places < end
    tokens = tl.load(rows_ptr + places, mask=has_token, other=0).to(tl.int64)
    r = first + tl.arange(0, BLOCK_R)
    is_inner = r < rank
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (tokens * stride_x)[:, None] + k[None, :]
    a_ptrs = a_ptr + (r * num_inputs)[None, :] + k[:, None]
    acc = tl.zeros([SIZE, BLOCK_R], tl.float32)
    for done in tl.range(0, num_inputs, BLOCK_K):
        is_input = k < num_inputs - done
        x = tl.load(x_ptrs, mask=has_token[:, None] & is_input[None, :], other=0.0)
        a = tl.load(a_ptrs, mask=is_input[:, None] & is_inner[None, :], other=0.0)
        acc = tl.dot(x, a, acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K
        a_ptrs += BLOCK_K
    inner_ptrs = inner_ptr + ((tokens * NUM_SEGMENTS + segment) * MOST_RANK)[:, None] + r[None, :]
    tl.store(inner_ptrs, acc.to(inner_ptr.dtype.element_ty), mask=has_token[:, None] & is_inner[None, :])


@triton.jit(
    do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["addresses_ptr", "ranks_ptr", "places_ptr"]
)
def expand_kernel(
    inner_ptr,
    addresses_ptr,
    ranks_ptr,
    places_ptr,
    rows_ptr,
    blocks_ptr,
    out_ptr,
    num_blocks,
    stride_out,
    stride_slot,
    NUM_SEGMENTS: tl.constexpr,
    MOST_RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (B, ceil(widest segment / BLOCK_N), segments): out += B inner, for the outputs of each segment."""
    block = tl.program_id(0)
    begin = tl.load(blocks_ptr + num_blocks + block)
    end = tl.load(blocks_ptr + 2 * num_blocks + block)
    if begin == end:
        return
    segment = tl.program_id(2)
    entry = tl.load(blocks_ptr + block).to(tl.int64) * stride_slot + segment
    rank = tl.load(ranks_ptr + entry)
    first_output = tl.load(places_ptr + 2 * segment)
    width = tl.load(places_ptr + 2 * segment + 1) - first_output
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if rank * tl.maximum(width - tl.program_id(1) * BLOCK_N, 0) == 0:
        return
    b_ptr = tl.load(addresses_ptr + 2 * entry + 1).to(inner_ptr.dtype)
    places = begin + tl.arange(0, SIZE)
    has_token = places < end
    tokens = tl.load(rows_ptr + places, mask=has_token, other=0).to(tl.int64)
    is_output = n < width
    r = tl.arange(0, BLOCK_R)
    inner_ptrs = inner_ptr + ((tokens * NUM_SEGMENTS + segment) * MOST_RANK)[:, None] + r[None, :]
    b_ptrs = b_ptr + n[None, :] + (r * width)[:, None]
    acc = tl.zeros([SIZE, BLOCK_N], tl.float32)
    for done in tl.range(0, rank, BLOCK_R):
        is_inner = r < rank - done
        inner = tl.load(inner_ptrs, mask=has_token[:, None] & is_inner[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=is_inner[:, None] & is_output[None, :], other=0.0)
        acc = tl.dot(inner, b, acc, input_precision=PRECISION)
        inner_ptrs += BLOCK_R
        b_ptrs += BLOCK_R * width
    out_ptrs = out_ptr + (tokens * stride_out)[:, None] + (first_output + n)[None, :]
    mask = has_token[:, None] & is_output[None, :]
    out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32) + acc
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


def group_by_slot_triton(rows: Tensor, starts: Tensor, slots: Tensor, num_tokens: int, num_slots: int) -> BlockedRows:
    """Arguments as `penstock.kernels.adapting.group_by_slot`."""
    of_tokens = torch.empty((num_tokens, 1), dtype=torch.int32, device=rows.device)
    num_rows = rows.shape[0]
    if num_rows and num_tokens:
        block = 128 if num_tokens <= 4 * num_rows else 1024
        slots_of_tokens_kernel[(num_rows, min(8, ceil_div(num_tokens, block)))](
            rows, starts, slots, of_tokens, num_slots, BLOCK=block, num_warps=4
        )
    return group_rows_triton(of_tokens, num_slots, are_some=True)


def add_low_rank_triton(
    x: Tensor, y: Tensor, addresses: Tensor, ranks: Tensor, places: Tensor, widest: int, most_rank: int,
    grouped: BlockedRows,
) -> None:  # fmt: skip
    """Arguments as `penstock.kernels.adapting.add_low_rank`."""
    num_tokens, num_segments, num_blocks = x.shape[0], ranks.shape[1], grouped.blocks.shape[1]
    if not num_tokens:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    is_fp32 = x.dtype == torch.float32
    precision = "ieee" if is_fp32 else "tf32"
    inner = torch.empty((num_tokens, num_segments, most_rank), dtype=x.dtype, device=x.device)
    block_r = min(32, max(16, next_power_of_two(most_rank)))
    shrink_kernel[(num_blocks, num_segments * ceil_div(most_rank, block_r))](
        x, addresses, ranks, grouped.rows, grouped.blocks, inner, num_blocks, x.shape[1], x.stride(0), ranks.stride(0),
        NUM_SEGMENTS=num_segments, MOST_RANK=most_rank, SIZE=grouped.size, BLOCK_R=block_r,
        BLOCK_K=64 if is_fp32 or grouped.size == 128 else 128, PRECISION=precision, num_warps=4, num_stages=3,
    )  # fmt: skip
    expand_kernel[(num_blocks, ceil_div(widest, _BLOCK_N), num_segments)](
        inner, addresses, ranks, places, grouped.rows, grouped.blocks, y, num_blocks, y.stride(0), ranks.stride(0),
        NUM_SEGMENTS=num_segments, MOST_RANK=most_rank, SIZE=grouped.size, BLOCK_N=_BLOCK_N, BLOCK_R=block_r,
        PRECISION=precision, num_warps=8 if grouped.size == 128 else 4, num_stages=3,
    )  # fmt: skip
