"""What the kernels of latent attention share: the running softmax (Milakov & Gimelshein 2018), in units of log2."""

import triton
import triton.language as tl

from penstock.kernels.triton.attention.kv_tiles import load_tile
from penstock.kernels.triton.attention.tiles import LOG2E


@triton.jit
def fold_scores(s, keep, l_i, m_i, scale):
    """Fold scores [M, N] into (l_i, m_i); returns (weights, factor of earlier sums, l_i, m_i)."""
    s = tl.where(keep, s * (scale * LOG2E), float("-inf"))
    m_new = tl.maximum(m_i, tl.max(s, 1))
    # A row may have seen no visible token yet; -inf - -inf would be NaN.
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - m_safe[:, None])
    alpha = tl.exp2(m_i - m_safe)
    return p, alpha, l_i * alpha + tl.sum(p, 1), m_new


@triton.jit
def fold_latents(
    acc,
    l_i,
    m_i,
    q,
    q_rotated,
    q_pos,
    pages_ptr,
    page_row_ptr,
    lo,
    hi,
    stride_page,
    stride_token,
    scale,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold positions [lo, hi), where lo is a multiple of BLOCK_N, into (acc, l_i, m_i). A latent is key and value.

    `q_pos` [M] are the queries' positions. Tokens after them, and from `hi` on, are masked.
    """
    r_offs = tl.arange(0, BLOCK_R)
    p_offs = tl.arange(0, BLOCK_P)
    for n_first in tl.range(lo, hi, BLOCK_N):
        n_offs = n_first + tl.arange(0, BLOCK_N)
        latents = load_tile(
            pages_ptr, page_row_ptr, n_first, n_offs, n_offs, hi, r_offs, stride_page, stride_token,
            RANK, BLOCK_R, PAGE_SIZE, ONE_PAGE, True, True,
        ).to(q.dtype)  # fmt: skip
        keys = load_tile(
            pages_ptr + RANK, page_row_ptr, n_first, n_offs, n_offs, hi, p_offs, stride_page, stride_token,
            ROPE, BLOCK_P, PAGE_SIZE, ONE_PAGE, True, True,
        ).to(q.dtype)  # fmt: skip
        s = tl.dot(q, tl.trans(latents), input_precision=PRECISION)
        s = tl.dot(q_rotated, tl.trans(keys), s, input_precision=PRECISION)
        keep = (n_offs[None, :] <= q_pos[:, None]) & (n_offs < hi)[None, :]
        p, alpha, l_i, m_i = fold_scores(s, keep, l_i, m_i, scale)
        acc = tl.dot(p.to(q.dtype), latents, acc * alpha[:, None], input_precision=PRECISION)
    return acc, l_i, m_i
