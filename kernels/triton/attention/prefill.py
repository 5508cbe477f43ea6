"""Causal attention of query chunks over their pages (cached prefix and the chunk itself).

FlashAttention-2's schedule over a ragged batch: a tile holds BLOCK_Q queries times the GROUP query heads
that share a KV head (rows = BLOCK_Q * GROUP <= BLOCK_M), so a short chunk still fills the tensor cores.
The grid has an upper bound of tiles that the host knows without reading lengths; each program finds its
row by binary search.
"""

import triton
import triton.language as tl

from penstock.kernels.triton.attention.kv_tiles import in_type_of_tiles
from penstock.kernels.triton.attention.tiles import LOG2E, attend, first_in_window


@triton.jit
def find_row(query_start_loc_ptr, tile, num_rows, BLOCK_Q: tl.constexpr):
    """The row that owns `tile`, where row b's tiles start at query_start_loc[b] // BLOCK_Q + b."""
    left = 0
    right = num_rows
    while left < right:
        middle = (left + right) // 2
        if tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle <= tile:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit
def queries_of(
    q_block, q_len, kv_head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr
):  # fmt: skip
    """(which query of its row, which head, whether there is such a query) of each of a tile's BLOCK_M rows."""
    m_offs = tl.arange(0, BLOCK_M)
    q_idx = q_block + m_offs // GROUP
    return q_idx, kv_head * GROUP + m_offs % GROUP, (q_idx < q_len) & (m_offs < BLOCK_Q * GROUP)


@triton.jit(do_not_specialize=["num_rows"])  # it varies from step to step
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    sinks_ptr,
    last_seen_ptr,
    out_ptr,
    num_rows,
    scale,
    softcap,
    window,
    stride_qt,
    stride_qh,
    stride_page,
    stride_head,
    stride_token,
    stride_table,
    stride_ot,
    stride_oh,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    SKIP_SINGLE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SEES_AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid (tiles * Hk,). SKIP_SINGLE leaves rows with one query to the decode kernel.

    SEES_AHEAD: tokens see positions up to their entry in `last_seen`, which may be after their own.
    """
    kv_head = tl.program_id(0) % KV_HEADS
    # The last tiles of a row see the most keys. They start first, so that no long one remains for the end.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS
    row = find_row(query_start_loc_ptr, tile, num_rows, BLOCK_Q)
    q_first = tl.load(query_start_loc_ptr + row)
    q_len = tl.load(query_start_loc_ptr + row + 1) - q_first
    q_block = (tile - (q_first // BLOCK_Q + row)) * BLOCK_Q
    if q_block >= q_len:
        return
    if SKIP_SINGLE and q_len == 1:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    prefix = seq_len - q_len

    q_idx, heads, q_valid = queries_of(q_block, q_len, kv_head, GROUP, BLOCK_M, BLOCK_Q)
    d_offs = tl.arange(0, BLOCK_D)
    q_mask = q_valid[:, None] & (d_offs < HEAD_DIM)[None, :]
    tokens = (q_first + q_idx).to(tl.int64)
    q_ptrs = q_ptr + (tokens * stride_qt + heads * stride_qh)[:, None] + d_offs[None, :]
    q, scale = in_type_of_tiles(tl.load(q_ptrs, mask=q_mask, other=0.0), scale, FORMAT)
    q_pos = prefix + q_idx

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    k_base = k_ptr + kv_head * stride_head
    v_base = v_ptr + kv_head * stride_head
    page_row = page_table_ptr + row.to(tl.int64) * stride_table

    first = 0
    if WINDOW != "":
        first = first_in_window(prefix + q_block, window, BLOCK_N, PAGE_SIZE, WINDOW)
    end = tl.minimum(prefix + q_block + BLOCK_Q, seq_len)
    last_seen = q_pos
    if SEES_AHEAD:
        last_seen = tl.load(last_seen_ptr + tokens, mask=q_valid, other=0)
        end = tl.maximum(end, tl.max(last_seen) + 1)
    # Tiles that are fully visible to every query of the block need no mask.
    full = first + (prefix + q_block + 1 - first) // BLOCK_N * BLOCK_N
    acc, l_i, m_i = attend(
        acc, l_i, m_i, q, q_pos, last_seen, k_base, v_base, page_row, first, full, end, stride_page, stride_token,
        scale, softcap, window, page_row, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, ONE_PAGE, False, False,
        WINDOW, HAS_SOFTCAP, False, PRECISION, FORMAT,
    )  # fmt: skip
    acc, l_i, m_i = attend(
        acc, l_i, m_i, q, q_pos, last_seen, k_base, v_base, page_row, full, end, end, stride_page, stride_token,
        scale, softcap, window, page_row, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, ONE_PAGE, True, True,
        WINDOW, HAS_SOFTCAP, False, PRECISION, FORMAT,
    )  # fmt: skip

    # Counted again from what is loaded again, so that it takes no registers until now.
    q_first = tl.load(query_start_loc_ptr + row, volatile=True)
    q_len = tl.load(query_start_loc_ptr + row + 1, volatile=True) - q_first
    q_block = (tile - (q_first // BLOCK_Q + row)) * BLOCK_Q
    q_idx, heads, q_valid = queries_of(q_block, q_len, kv_head, GROUP, BLOCK_M, BLOCK_Q)
    tokens = (q_first + q_idx).to(tl.int64)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2E
        m_all = tl.maximum(m_i, sink)
        acc = acc * tl.exp2(m_i - m_all)[:, None]
        l_i = l_i * tl.exp2(m_i - m_all) + tl.exp2(sink - m_all)
    out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    out_ptrs = out_ptr + (tokens * stride_ot + heads * stride_oh)[:, None] + d_offs[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=q_valid[:, None] & (d_offs < HEAD_DIM)[None, :])
