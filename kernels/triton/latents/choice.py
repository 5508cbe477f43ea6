"""Scores of an indexer over pages, the choice of the highest, and the write of index keys."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.latents.choice import MOST_SCORES, Choice
from penstock.kernels.triton.attention.kv_tiles import load_tile
from penstock.kernels.triton.device import ceil_div, next_power_of_two

BLOCK_N = 64  # positions of a program; not tuned on a GPU yet


@triton.jit
def row_of(query_start_loc_ptr, token, num_rows):
    """The row that a token belongs to; the last one for a token behind all rows, which pads a captured graph."""
    left = 0
    right = num_rows
    while left < right:
        middle = (left + right) // 2
        if tl.load(query_start_loc_ptr + middle) <= token:
            left = middle + 1
        else:
            right = middle
    return tl.minimum(left, num_rows) - 1


# Arguments that vary from step to step are not specialised: otherwise each new class of values would be compiled.
@triton.jit(do_not_specialize=["first_token", "num_rows", "width"])
def index_scores_kernel(
    q_ptr,
    weights_ptr,
    keys_ptr,
    page_table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    out_ptr,
    first_token,
    num_rows,
    width,
    stride_qt,
    stride_qh,
    stride_wt,
    stride_page,
    stride_token,
    stride_table,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tokens from `first_token` on, blocks of positions). Positions that a token does not see get -inf."""
    token = first_token + tl.program_id(0)
    row = row_of(query_start_loc_ptr, token, num_rows)
    end = tl.load(query_start_loc_ptr + row + 1)
    num_seen = tl.where(token < end, tl.load(seq_lens_ptr + row) - (end - token) + 1, 0)
    n_first = tl.program_id(1) * BLOCK_N
    n_offs = n_first + tl.arange(0, BLOCK_N)
    scores = tl.full([BLOCK_N], float("-inf"), dtype=tl.float32)
    if n_first < num_seen:
        heads = tl.arange(0, BLOCK_H)
        d_offs = tl.arange(0, BLOCK_D)
        at = q_ptr + token.to(tl.int64) * stride_qt + heads[:, None] * stride_qh + d_offs[None, :]
        q = tl.load(at, mask=(heads < HEADS)[:, None] & (d_offs < DIM)[None, :], other=0.0)
        weights = tl.load(weights_ptr + token.to(tl.int64) * stride_wt + heads, mask=heads < HEADS, other=0.0)
        keys = load_tile(
            keys_ptr, page_table_ptr + row.to(tl.int64) * stride_table, n_first, n_offs, n_offs, num_seen, d_offs,
            stride_page, stride_token, DIM, BLOCK_D, PAGE_SIZE, ONE_PAGE, True, True,
        ).to(q.dtype)  # fmt: skip
        of_heads = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
        found = tl.sum(tl.maximum(of_heads, 0.0) * weights[:, None], 0)
        scores = tl.where(n_offs < num_seen, found, scores)
    to = out_ptr + tl.program_id(0).to(tl.int64) * width + n_offs
    tl.store(to, scores, mask=n_offs < width)


def choose_triton(
    q: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    top_k: int,
    max_seq_len: int,
) -> Choice:
    """Arguments and result as `penstock.kernels.latents.choice.choose`. The host does not synchronise."""
    num_tokens, num_heads, dim = q.shape
    page_size, num_rows, keys = pages.shape[2], seq_lens.shape[0], pages[..., -dim:]
    slots = torch.zeros((num_tokens, top_k), dtype=torch.int32, device=q.device)
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=q.device)
    rows = (torch.searchsorted(query_start_loc, tokens, right=True) - 1).clamp_(max=num_rows - 1)
    ends = query_start_loc[rows + 1]
    num_seen = (seq_lens[rows] - (ends - tokens) + 1) * (tokens < ends)
    num = min(top_k, max_seq_len)
    count = max(1, MOST_SCORES // max_seq_len)
    for first in range(0, num_tokens, count):
        its = slice(first, min(first + count, num_tokens))
        scores = torch.empty((its.stop - first, max_seq_len), dtype=torch.float32, device=q.device)
        index_scores_kernel[(its.stop - first, ceil_div(max_seq_len, BLOCK_N))](
            q,
            weights,
            keys,
            page_table,
            query_start_loc,
            seq_lens,
            scores,
            first,
            num_rows,
            max_seq_len,
            q.stride(0),
            q.stride(1),
            weights.stride(0),
            pages.stride(0),
            pages.stride(2),
            page_table.stride(0),
            HEADS=num_heads,
            BLOCK_H=max(16, next_power_of_two(num_heads)),
            DIM=dim,
            BLOCK_D=max(16, next_power_of_two(dim)),
            BLOCK_N=BLOCK_N,
            PAGE_SIZE=page_size,
            ONE_PAGE=page_size >= BLOCK_N,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",  # as in `latent_attention_triton`
            num_warps=4,
        )
        positions = scores.topk(num).indices
        # Past a token's count its positions are arbitrary ones after it, whose pages may not be the row's.
        visible = positions.clamp_(max=num_seen[its, None].clamp(min=1) - 1)
        pages_of = page_table[rows[its, None], visible // page_size]
        slots[its, :num] = pages_of * page_size + (visible % page_size).int()
    return Choice(slots, num_seen.clamp(min=0, max=top_k).int())


@triton.jit
def keep_index_keys_kernel(
    k_ptr,
    pages_ptr,
    slots_ptr,
    stride_kt,
    stride_page,
    stride_token,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Grid (T,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        offs = tl.arange(0, BLOCK_D)
        entry = pages_ptr + slot // PAGE_SIZE * stride_page + slot % PAGE_SIZE * stride_token
        key = tl.load(k_ptr + token * stride_kt + offs, mask=offs < DIM, other=0.0)
        tl.store(entry + offs, key.to(pages_ptr.dtype.element_ty), mask=offs < DIM)


def keep_index_keys_triton(k: Tensor, pages: Tensor, slot_mapping: Tensor) -> None:
    """Arguments as `penstock.kernels.latents.choice.keep_index_keys`."""
    num_tokens, dim = k.shape
    if not num_tokens:
        return
    keep_index_keys_kernel[(num_tokens,)](
        k,
        pages[..., -dim:],
        slot_mapping,
        k.stride(0),
        pages.stride(0),
        pages.stride(2),
        DIM=dim,
        BLOCK_D=next_power_of_two(dim),
        PAGE_SIZE=pages.shape[2],
        num_warps=2,
    )
