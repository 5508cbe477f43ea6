"""Split-KV attention for rows with one new token (flash decoding, Dao et al. 2023), over KV pages.

One program handles one (KV head, row, split). The query heads that share the KV head fill a tile of at
least 16 rows, so each KV byte is read once. The grid depends only on the batch, and lengths are read on
the device, so a captured CUDA graph serves any context length. With several splits, each one writes a
partial result, and `combine_kernel` merges them by their log-sum-exp.
"""

import triton
import triton.language as tl

from penstock.kernels.triton.attention.kv_tiles import in_type_of_tiles
from penstock.kernels.triton.attention.tiles import LOG2E, attend, first_in_window


@triton.jit
def split_tiles(
    seq_len, window, num_splits,
    BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, MIN_TILES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """(first token of the first visible tile, tiles per split) of a row. Both kernels get the same answer."""
    first = 0
    if WINDOW != "":
        first = first_in_window(seq_len - 1, window, BLOCK_N, PAGE_SIZE, WINDOW)
    tiles = tl.cdiv(seq_len - first, BLOCK_N)
    return first, tl.maximum(tl.cdiv(tiles, num_splits), MIN_TILES)


# Arguments that vary from step to step are not specialised: otherwise each new class of values would be compiled.
@triton.jit(do_not_specialize=["num_splits"])
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    sinks_ptr,
    paths_ptr,
    out_ptr,
    partial_ptr,
    partial_lse_ptr,
    scale,
    softcap,
    window,
    num_splits,
    stride_qt,
    stride_qh,
    stride_page,
    stride_head,
    stride_token,
    stride_table,
    stride_paths,
    stride_ot,
    stride_oh,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_PATHS: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid (Hk, N, num_splits). Rows whose query length is not 1 are left to the prefill kernel.

    HAS_PATHS: some rows are nodes of trees, and ONE_PAGE is not set.
    """
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(query_start_loc_ptr + row).to(tl.int64)  # times a stride it may exceed 31 bits
    if tl.load(query_start_loc_ptr + row + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    first, tiles = split_tiles(seq_len, window, num_splits, BLOCK_N, PAGE_SIZE, MIN_TILES, WINDOW)
    lo = first + split * tiles * BLOCK_N
    hi = tl.minimum(lo + tiles * BLOCK_N, seq_len)
    if SPLIT and lo >= seq_len:
        return

    group = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + group
    d_offs = tl.arange(0, BLOCK_D)
    q_mask = (group < GROUP)[:, None] & (d_offs < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + token * stride_qt + heads[:, None] * stride_qh + d_offs[None, :], mask=q_mask, other=0.0)
    q, scale = in_type_of_tiles(q, scale, FORMAT)
    q_pos = tl.zeros([BLOCK_M], dtype=tl.int32) + (seq_len - 1)

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    # A few rows keep sums of weights for each place of a tile: threads meet once for their sum, at the end.
    l_i = tl.zeros([BLOCK_M, BLOCK_N] if BLOCK_M <= 32 else [BLOCK_M], dtype=tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    acc, l_i, m_i = attend(
        acc, l_i, m_i, q, q_pos, q_pos, k_ptr + kv_head * stride_head, v_ptr + kv_head * stride_head,
        page_table_ptr + row.to(tl.int64) * stride_table, lo, hi, hi, stride_page, stride_token,
        scale, softcap, window, paths_ptr + row.to(tl.int64) * stride_paths, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE,
        ONE_PAGE, True, False, WINDOW, HAS_SOFTCAP, HAS_PATHS, PRECISION, FORMAT,
    )  # fmt: skip
    if BLOCK_M <= 32:
        l_i = tl.sum(l_i, 1)

    if not SPLIT:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + heads, mask=group < GROUP, other=0.0).to(tl.float32) * LOG2E
            m_all = tl.maximum(m_i, sink)
            acc = acc * tl.exp2(m_i - m_all)[:, None]
            l_i = l_i * tl.exp2(m_i - m_all) + tl.exp2(sink - m_all)
        out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
        out_ptrs = out_ptr + token * stride_ot + heads[:, None] * stride_oh + d_offs[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=q_mask)
    else:
        # The window may hide every token of a split's only tile. Then l_i is 0.
        num_heads = tl.num_programs(0) * GROUP
        slot = (row.to(tl.int64) * num_heads + heads) * num_splits + split
        part = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
        tl.store(partial_ptr + slot[:, None] * HEAD_DIM + d_offs[None, :], part, mask=q_mask)
        tl.store(partial_lse_ptr + slot, m_i + tl.log2(l_i), mask=group < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    partial_ptr,
    partial_lse_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    sinks_ptr,
    out_ptr,
    window,
    num_splits,
    stride_ot,
    stride_oh,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid (Hq, N): merge the splits of one head, add the attention sink, write the output row."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    token = tl.load(query_start_loc_ptr + row).to(tl.int64)  # times a stride it may exceed 31 bits
    if tl.load(query_start_loc_ptr + row + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    first, tiles = split_tiles(seq_len, window, num_splits, BLOCK_N, PAGE_SIZE, MIN_TILES, WINDOW)
    num_used = tl.cdiv(seq_len - first, tiles * BLOCK_N)
    slot = (row.to(tl.int64) * tl.num_programs(0) + head) * num_splits
    splits = tl.arange(0, BLOCK_S)
    used = splits < num_used
    lse = tl.load(partial_lse_ptr + slot + splits, mask=used, other=float("-inf"))
    top = tl.max(lse, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(lse - top)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    d_offs = tl.arange(0, BLOCK_D)
    mask = used[:, None] & (d_offs < HEAD_DIM)[None, :]
    part = tl.load(partial_ptr + (slot + splits)[:, None] * HEAD_DIM + d_offs[None, :], mask=mask, other=0.0)
    out = tl.sum(part * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out_ptrs = out_ptr + token * stride_ot + head * stride_oh + d_offs
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=d_offs < HEAD_DIM)
