"""Attention without a direction over a ragged batch: FlashAttention-2's schedule, without pages.

The grid has an upper bound of tiles that the host knows without reading lengths, as in `prefill.py`; each program finds
its row by binary search.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention.ragged_attention import RaggedRows
from penstock.kernels.triton.attention.prefill import find_row
from penstock.kernels.triton.attention.tiles import LOG2E
from penstock.kernels.triton.device import next_power_of_two

_BLOCK, _BLOCK_FP32 = 64, 16
"""Queries, and keys, of a tile. Exact products of fp32 take many registers, so their tiles are smaller."""


@triton.jit(do_not_specialize=["num_rows", "reach"])
def ragged_attention_kernel(
    qkv_ptr,
    query_start_loc_ptr,
    out_ptr,
    num_rows,
    scale,
    reach,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_REACH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles * H,)."""
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    row = find_row(query_start_loc_ptr, tile, num_rows, BLOCK_Q)
    first = tl.load(query_start_loc_ptr + row)
    length = tl.load(query_start_loc_ptr + row + 1) - first
    q_block = (tile - (first // BLOCK_Q + row)) * BLOCK_Q
    if q_block >= length:
        return
    stride: tl.constexpr = 3 * HEADS * HEAD_DIM
    d_offs = tl.arange(0, BLOCK_D)
    in_head = d_offs < HEAD_DIM
    q_idx = q_block + tl.arange(0, BLOCK_Q)
    q_tokens = (first + q_idx).to(tl.int64)
    q_mask = (q_idx < length)[:, None] & in_head[None, :]
    base = qkv_ptr + head * HEAD_DIM
    q = tl.load(base + q_tokens[:, None] * stride + d_offs[None, :], mask=q_mask, other=0.0)

    acc = tl.zeros([BLOCK_Q, BLOCK_D], dtype=tl.float32)
    l_i = tl.zeros([BLOCK_Q], dtype=tl.float32)
    m_i = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
    begin = 0
    end = length
    if HAS_REACH:
        begin = tl.maximum(q_block - reach, 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(q_block + BLOCK_Q + reach, length)
    for n_block in range(begin, end, BLOCK_N):
        n_idx = n_block + tl.arange(0, BLOCK_N)
        n_tokens = (first + n_idx).to(tl.int64)
        n_mask = (n_idx < length)[:, None] & in_head[None, :]
        k_ptrs = base + HEADS * HEAD_DIM + n_tokens[:, None] * stride + d_offs[None, :]
        k = tl.load(k_ptrs, mask=n_mask, other=0.0)
        v = tl.load(k_ptrs + HEADS * HEAD_DIM, mask=n_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
        seen = (n_idx < length)[None, :]
        if HAS_REACH:
            seen = seen & (tl.abs(q_idx[:, None] - n_idx[None, :]) <= reach)
        scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a tile may have nothing that a query sees
        p = tl.exp2(scores - shift[:, None])
        alpha = tl.exp2(m_i - shift)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m_i = m_new
    out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    out_ptrs = out_ptr + q_tokens[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + d_offs[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=q_mask)


def ragged_attention_triton(qkv: Tensor, rows: RaggedRows, scale: float, reach: int | None = None) -> Tensor:
    """As `ragged_attention`."""
    num_tokens, _, num_heads, head_dim = qkv.shape
    out = qkv.new_empty(num_tokens, num_heads, head_dim)
    num_rows, is_fp32 = len(rows.lens), qkv.dtype == torch.float32
    block = _BLOCK_FP32 if is_fp32 else _BLOCK
    num_tiles = num_tokens // block + num_rows
    ragged_attention_kernel[(num_tiles * num_heads,)](
        qkv,
        rows.query_start_loc,
        out,
        num_rows,
        scale,
        0 if reach is None else reach,
        HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, next_power_of_two(head_dim)),
        BLOCK_Q=block,
        BLOCK_N=2 * block if is_fp32 else block,
        HAS_REACH=reach is not None,
        PRECISION="ieee" if is_fp32 else "tf32",
        num_warps=4,
    )
    return out
