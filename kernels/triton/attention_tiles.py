"""The inner loop shared by the decode and the prefill attention kernels.

One call of `attend` walks KV tiles of BLOCK_N tokens, gathered over pages, and folds them into the
running softmax of BLOCK_M query rows (Milakov & Gimelshein 2018, as in FlashAttention-2). Scores are
kept in units of log2, so that `exp2` replaces `exp`.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(
    base_ptr,
    page_row_ptr,
    n_first,
    n_offs,
    n_end,
    d_offs,
    stride_page,
    stride_token,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    CHECK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[BLOCK_N, BLOCK_D] of K or V. The only place where KV is read: a quantized pool would dequantize here.

    ONE_PAGE: the tile lies inside one page, so one page id is enough. CHECK: tokens >= n_end read as 0
    (their slots may hold anything, even NaN, and 0 * NaN would reach the sum).
    """
    if ONE_PAGE:
        page = tl.load(page_row_ptr + n_first // PAGE_SIZE).to(tl.int64)
        in_page = n_first % PAGE_SIZE + (n_offs - n_first)
        ptrs = (base_ptr + page * stride_page) + in_page[:, None] * stride_token + d_offs[None, :]
    else:
        if CHECK:
            pages = tl.load(page_row_ptr + n_offs // PAGE_SIZE, mask=n_offs < n_end, other=0).to(tl.int64)
        else:
            pages = tl.load(page_row_ptr + n_offs // PAGE_SIZE).to(tl.int64)
        ptrs = base_ptr + (pages * stride_page + (n_offs % PAGE_SIZE) * stride_token)[:, None] + d_offs[None, :]
    if CHECK:
        mask = (n_offs < n_end)[:, None]
        if HEAD_DIM != BLOCK_D:
            mask = mask & (d_offs < HEAD_DIM)[None, :]
        tile = tl.load(ptrs, mask=mask, other=0.0)
    elif HEAD_DIM != BLOCK_D:
        tile = tl.load(ptrs, mask=(d_offs < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile.to(DTYPE)


@triton.jit
def first_in_window(position, window, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Where the tiles of a query at `position` begin.

    Not before the page of the first token that it sees: the page before may be gone, and its id be anything. A tile
    lies in one page, or begins with one.
    """
    return tl.maximum(position - window + 1, 0) // min(BLOCK_N, PAGE_SIZE) * min(BLOCK_N, PAGE_SIZE)


@triton.jit
def attend(
    acc,
    l_i,
    m_i,
    q,
    q_pos,
    k_base,
    v_base,
    page_row_ptr,
    tile_lo,
    tile_hi,
    n_end,
    stride_kp,
    stride_kt,
    stride_vp,
    stride_vt,
    scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    CHECK: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold KV tiles of BLOCK_N tokens, from tile_lo on until tile_hi is reached, into (acc, l_i, m_i).

    `q_pos` [BLOCK_M] are the queries' positions. CHECK masks tokens >= n_end, CAUSAL those after the query,
    HAS_WINDOW those at or before q_pos - window.
    """
    d_offs = tl.arange(0, BLOCK_D)
    for n_first in tl.range(tile_lo, tile_hi, BLOCK_N):
        n_offs = n_first + tl.arange(0, BLOCK_N)
        k = load_tile(
            k_base, page_row_ptr, n_first, n_offs, n_end, d_offs, stride_kp, stride_kt,
            HEAD_DIM, BLOCK_D, PAGE_SIZE, ONE_PAGE, CHECK, q.dtype,
        )  # fmt: skip
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), exact at both ends of the range.
            s = softcap * (1.0 - 2.0 / (tl.exp2(s * (scale * 2.0 * LOG2E / softcap)) + 1.0)) * LOG2E
        else:
            s = s * (scale * LOG2E)
        if CAUSAL or CHECK or HAS_WINDOW:
            keep = n_offs[None, :] <= q_pos[:, None]
            if CHECK and not CAUSAL:
                keep = (n_offs < n_end)[None, :]
            if HAS_WINDOW:
                keep = keep & (n_offs[None, :] > q_pos[:, None] - window)
            s = tl.where(keep, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        # A row may have seen no visible token yet; -inf - -inf would be NaN.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if (CAUSAL or CHECK or HAS_WINDOW) else m_new
        p = tl.exp2(s - m_safe[:, None])
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = load_tile(
            v_base, page_row_ptr, n_first, n_offs, n_end, d_offs, stride_vp, stride_vt,
            HEAD_DIM, BLOCK_D, PAGE_SIZE, ONE_PAGE, CHECK, q.dtype,
        )  # fmt: skip
        acc = tl.dot(p.to(q.dtype), v, acc, input_precision=PRECISION)
        m_i = m_new
    return acc, l_i, m_i
