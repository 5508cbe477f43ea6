"""The inner loop shared by the decode and the prefill attention kernels.

One call of `attend` walks KV tiles of BLOCK_N tokens, gathered over pages, and folds them into the
running softmax of BLOCK_M query rows (Milakov & Gimelshein 2018, as in FlashAttention-2). Scores are
kept in units of log2, so that `exp2` replaces `exp`.
"""

import triton
import triton.language as tl

from penstock.kernels.triton.attention.kv_tiles import load_kv

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def first_seen(position, window, WINDOW: tl.constexpr):
    """The first position that a query sees, in a "sliding" WINDOW or in its own "chunk". It may be negative."""
    return position - position % window if WINDOW == "chunk" else position - window + 1


@triton.jit
def first_in_window(position, window, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr):
    """Where the tiles of a query at `position` begin.

    They must not begin before the page of the first visible token, because earlier pages may be gone, and their ids
    arbitrary. A tile is inside one page, or begins with a page.
    """
    return tl.maximum(first_seen(position, window, WINDOW), 0) // min(BLOCK_N, PAGE_SIZE) * min(BLOCK_N, PAGE_SIZE)


@triton.jit
def attend(
    acc,
    l_i,
    m_i,
    q,
    q_pos,
    last_seen,
    k_base,
    v_base,
    page_row_ptr,
    tile_lo,
    tile_hi,
    n_end,
    stride_page,
    stride_token,
    scale,
    softcap,
    window,
    path_ptr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    CHECK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_PATHS: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Fold KV tiles of BLOCK_N tokens, from tile_lo on until tile_hi is reached, into (acc, l_i, m_i).

    `q_pos` [BLOCK_M] are the queries' positions. CHECK masks tokens >= n_end. CAUSAL masks tokens after `last_seen`
    [BLOCK_M], usually the queries' own positions. WINDOW masks tokens before the first one that a query sees. `scale`
    [BLOCK_M] multiplies scores. `l_i` is [BLOCK_M], or [BLOCK_M, BLOCK_N] for sums at each place of a tile.
    """
    d_offs = tl.arange(0, BLOCK_D)
    # Few rows have fewer scores than tokens have numbers, so scales are applied to scores and weights instead.
    APPLY: tl.constexpr = q.shape[0] > 32
    SCALES_SCORES: tl.constexpr = FORMAT != "" and FORMAT != "int4" and not APPLY
    for n_first in tl.range(tile_lo, tile_hi, BLOCK_N):
        n_offs = n_first + tl.arange(0, BLOCK_N)
        places = n_offs
        if HAS_PATHS:
            ahead = n_offs - tl.load(path_ptr)  # distance from the tree's first position
            is_placed = (ahead >= 0) & (n_offs < n_end)
            places = tl.where(is_placed, tl.load(path_ptr + 1 + ahead, mask=is_placed, other=0), n_offs)
        k, k_scales = load_kv(
            k_base, page_row_ptr, n_first, n_offs, places, n_end, d_offs, stride_page, stride_token,
            HEAD_DIM, BLOCK_D, PAGE_SIZE, ONE_PAGE, CHECK, False, APPLY, q.dtype, FORMAT,
        )  # fmt: skip
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SCALES_SCORES:
            s = s * k_scales[None, :]
        factor = scale * LOG2E
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), exact at both ends of the range.
            s = 1.0 - 2.0 / (tl.exp2(s * (scale * (2.0 * LOG2E / softcap))[:, None]) + 1.0)
            factor = tl.zeros_like(scale) + softcap * LOG2E
        if CAUSAL or CHECK or WINDOW != "":
            keep = n_offs[None, :] <= last_seen[:, None]
            if CHECK and not CAUSAL:
                keep = (n_offs < n_end)[None, :]
            if WINDOW != "":
                keep = keep & (n_offs[None, :] >= first_seen(q_pos, window, WINDOW)[:, None])
            s = tl.where(keep, s, float("-inf"))
        v, v_scales = load_kv(
            v_base, page_row_ptr, n_first, n_offs, places, n_end, d_offs, stride_page, stride_token,
            HEAD_DIM, BLOCK_D, PAGE_SIZE, ONE_PAGE, CHECK, True, APPLY, q.dtype, FORMAT,
        )  # fmt: skip
        if SCALES_SCORES:
            # The largest weight times scale, where a power of two stands for the scale. So the largest product is
            # nearly 1, which fp16 needs. The sum of weights is in fp32, and may be large or small.
            bits = tl.maximum(v_scales, 2.0**-24).to(tl.uint32, bitcast=True)
            largest = tl.max(s * factor[:, None] + ((bits >> 23).to(tl.int32) - 126).to(tl.float32)[None, :], 1)
        else:
            largest = tl.max(s, 1) * factor
        m_new = tl.maximum(m_i, largest)
        # A row may have seen no visible token yet; -inf - -inf would be NaN.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if (CAUSAL or CHECK or WINDOW != "") else m_new
        p = tl.exp2(s * factor[:, None] - m_safe[:, None])
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha[:, None] + p if len(l_i.shape) == 2 else l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if SCALES_SCORES:
            p = p * v_scales[None, :]
        acc = tl.dot(p.to(q.dtype), v, acc, input_precision=PRECISION)
        m_i = m_new
    return acc, l_i, m_i
