"""Latent attention over pages, the absorbed way: one kernel for rows with one query, one for chunks of queries.

As in `attention/decode.py` and `attention/prefill.py`, but all heads read the same entry of the pages. A tile is
BLOCK_Q queries times BLOCK_H heads, and every loaded latent is both key and value.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.attention.decode import combine_kernel, split_tiles
from penstock.kernels.triton.attention.paged_attention import choose_splits
from penstock.kernels.triton.attention.prefill import find_row
from penstock.kernels.triton.device import DeviceFacts, ceil_div, device_facts, next_power_of_two
from penstock.kernels.triton.latents.tiles import fold_latents


class LatentTiles(NamedTuple):
    """Tiles of both kernels; decode splits a context over `num_splits` programs."""

    block_h: int
    block_q: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int


MAX_SPLITS = 32  # all splits are merged at once, and each is as long as a latent


def latent_tiles(facts: DeviceFacts, num_heads: int, num_rows: int, max_seq_len: int, itemsize: int) -> LatentTiles:
    """Tiles for `num_rows` rows of up to `max_seq_len` tokens.

    A tile has 32 rows, because the sums of 64 rows, each as long as a latent, would spill the registers of 8 warps.
    With num_stages 5, latents have two tiles in flight, since the page ids that address them take every other stage.
    That is 111 KiB per program, so two programs fit on a Hopper multiprocessor. GPUs with less than that leave one tile
    in flight. None of these constants has been tuned on a GPU yet.
    """
    if itemsize == 4:  # exact fp32 products run on the plain cores: for tests and parity, not for speed
        block_h, block_q, block_n, warps, stages = 16, 1, 16, 8, 1
    else:
        block_h = min(32, max(16, next_power_of_two(num_heads)))
        block_q, block_n, warps, stages = 32 // block_h, 32, 8, 5 if facts.shared_bytes >= 163 << 10 else 3
    slots = facts.num_sms * (2 if facts.is_large else 1)
    # Few rows are always split, however short, so that only their number decides which variant of the kernel is used.
    num_tiles = min(MAX_SPLITS, max(2, ceil_div(max_seq_len, block_n)))
    num_splits = choose_splits(num_rows * ceil_div(num_heads, block_h), slots, num_tiles)
    return LatentTiles(block_h, block_q, block_n, num_splits, warps, stages)


# Arguments that vary from step to step are not specialised: otherwise each new class of values would be compiled.
@triton.jit(do_not_specialize=["num_splits"])
def latent_decode_kernel(
    q_ptr,
    pages_ptr,
    page_table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_ptr,
    partial_lse_ptr,
    scale,
    num_splits,
    stride_qt,
    stride_qh,
    stride_page,
    stride_token,
    stride_table,
    stride_ot,
    stride_oh,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (blocks of heads, N, num_splits). Rows whose query length is not 1 are left to the other kernel."""
    row = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(query_start_loc_ptr + row).to(tl.int64)  # times a stride it may exceed 31 bits
    if tl.load(query_start_loc_ptr + row + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    _, tiles = split_tiles(seq_len, 0, num_splits, BLOCK_N, PAGE_SIZE, 1, "")
    lo = split * tiles * BLOCK_N
    hi = tl.minimum(lo + tiles * BLOCK_N, seq_len)
    if SPLIT and lo >= seq_len:
        return

    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    r_offs = tl.arange(0, BLOCK_R)
    p_offs = tl.arange(0, BLOCK_P)
    is_head = (heads < NUM_HEADS)[:, None]
    mask = is_head & (r_offs < RANK)[None, :]
    q_heads = q_ptr + token * stride_qt + heads[:, None] * stride_qh
    q = tl.load(q_heads + r_offs[None, :], mask=mask, other=0.0)
    q_rotated = tl.load(q_heads + RANK + p_offs[None, :], mask=is_head & (p_offs < ROPE)[None, :], other=0.0)
    q_pos = tl.zeros([BLOCK_H], dtype=tl.int32) + (seq_len - 1)

    acc, l_i, m_i = fold_latents(
        tl.zeros([BLOCK_H, BLOCK_R], dtype=tl.float32),
        tl.zeros([BLOCK_H], dtype=tl.float32),
        tl.full([BLOCK_H], float("-inf"), dtype=tl.float32),
        q, q_rotated, q_pos, pages_ptr, page_table_ptr + row.to(tl.int64) * stride_table, lo, hi, stride_page,
        stride_token, scale, RANK, BLOCK_R, ROPE, BLOCK_P, BLOCK_N, PAGE_SIZE, ONE_PAGE, PRECISION,
    )  # fmt: skip
    mean = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    if not SPLIT:
        out_ptrs = out_ptr + token * stride_ot + heads[:, None] * stride_oh + r_offs[None, :]
        tl.store(out_ptrs, mean.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        slot = (row.to(tl.int64) * NUM_HEADS + heads) * num_splits + split
        tl.store(partial_ptr + slot[:, None] * RANK + r_offs[None, :], mean, mask=mask)
        tl.store(partial_lse_ptr + slot, m_i + tl.log2(l_i), mask=heads < NUM_HEADS)


@triton.jit(do_not_specialize=["num_rows"])  # it varies from step to step
def latent_prefill_kernel(
    q_ptr,
    pages_ptr,
    page_table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    out_ptr,
    num_rows,
    scale,
    stride_qt,
    stride_qh,
    stride_page,
    stride_token,
    stride_table,
    stride_ot,
    stride_oh,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles * blocks of heads,). Rows with one query are left to the decode kernel."""
    HEAD_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    # The last tiles of a row see the most keys. They start first, so that no long one remains for the end.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // HEAD_BLOCKS
    row = find_row(query_start_loc_ptr, tile, num_rows, BLOCK_Q)
    q_first = tl.load(query_start_loc_ptr + row)
    q_len = tl.load(query_start_loc_ptr + row + 1) - q_first
    q_block = (tile - (q_first // BLOCK_Q + row)) * BLOCK_Q
    if q_block >= q_len or q_len == 1:
        return
    seq_len = tl.load(seq_lens_ptr + row)

    m_offs = tl.arange(0, BLOCK_Q * BLOCK_H)
    r_offs = tl.arange(0, BLOCK_R)
    p_offs = tl.arange(0, BLOCK_P)
    q_idx = q_block + m_offs // BLOCK_H
    heads = tl.program_id(0) % HEAD_BLOCKS * BLOCK_H + m_offs % BLOCK_H
    is_query = ((q_idx < q_len) & (heads < NUM_HEADS))[:, None]
    mask = is_query & (r_offs < RANK)[None, :]
    tokens = (q_first + q_idx).to(tl.int64)
    q_rows = q_ptr + (tokens * stride_qt + heads * stride_qh)[:, None]
    q = tl.load(q_rows + r_offs[None, :], mask=mask, other=0.0)
    q_rotated = tl.load(q_rows + RANK + p_offs[None, :], mask=is_query & (p_offs < ROPE)[None, :], other=0.0)
    q_pos = seq_len - q_len + q_idx
    hi = tl.minimum(seq_len - q_len + q_block + BLOCK_Q, seq_len)

    acc, l_i, _ = fold_latents(
        tl.zeros([BLOCK_Q * BLOCK_H, BLOCK_R], dtype=tl.float32),
        tl.zeros([BLOCK_Q * BLOCK_H], dtype=tl.float32),
        tl.full([BLOCK_Q * BLOCK_H], float("-inf"), dtype=tl.float32),
        q, q_rotated, q_pos, pages_ptr, page_table_ptr + row.to(tl.int64) * stride_table, 0, hi, stride_page,
        stride_token, scale, RANK, BLOCK_R, ROPE, BLOCK_P, BLOCK_N, PAGE_SIZE, ONE_PAGE, PRECISION,
    )  # fmt: skip
    out_ptrs = out_ptr + (tokens * stride_ot + heads * stride_oh)[:, None] + r_offs[None, :]
    mean = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(out_ptrs, mean.to(out_ptr.dtype.element_ty), mask=mask)


def latent_attention_triton(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    kv_rank: int,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    tiles: LatentTiles | None = None,
) -> Tensor:
    """Arguments and result as `penstock.kernels.latents.attention.latent_attention`.

    `tiles` override the rule above, for measurements and tests. The host does not synchronise, and the grids depend
    only on shapes, `max_query_len` and `max_seq_len`, so a captured graph serves shorter rows.
    """
    num_tokens, num_heads, dim = q.shape
    out = torch.empty((num_tokens, num_heads, kv_rank), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    num_rows = seq_lens.shape[0]
    if tiles is None:
        tiles = latent_tiles(device_facts(q.device), num_heads, num_rows, max_seq_len, q.element_size())
    head_blocks = ceil_div(num_heads, tiles.block_h)
    constants = {
        "NUM_HEADS": num_heads,
        "RANK": kv_rank,
        "BLOCK_R": next_power_of_two(kv_rank),
        "ROPE": dim - kv_rank,
        "BLOCK_P": max(16, next_power_of_two(dim - kv_rank)),
        "BLOCK_H": tiles.block_h,
        "BLOCK_N": tiles.block_n,
        "PAGE_SIZE": pages.shape[2],
        "ONE_PAGE": pages.shape[2] >= tiles.block_n,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",  # fp32 is for tokens equal to other programs'
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    rows = (q, pages, page_table, query_start_loc, seq_lens, out)
    strides = (q.stride(0), q.stride(1), pages.stride(0), pages.stride(2), page_table.stride(0), *out.stride()[:2])
    splits = tiles.num_splits
    partial = partial_lse = out  # not used with one split
    if splits > 1:
        shape = (num_rows, num_heads, splits)
        partial = torch.empty((*shape, kv_rank), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    latent_decode_kernel[(head_blocks, num_rows, splits)](
        *rows, partial, partial_lse, scale, splits, *strides, SPLIT=splits > 1, **constants
    )
    if splits > 1:
        combine_kernel[(num_heads, num_rows)](
            partial,
            partial_lse,
            query_start_loc,
            seq_lens,
            q,
            out,
            0,
            splits,
            *out.stride()[:2],
            HEAD_DIM=kv_rank,
            BLOCK_D=next_power_of_two(kv_rank),
            BLOCK_N=tiles.block_n,
            PAGE_SIZE=pages.shape[2],
            BLOCK_S=max(16, next_power_of_two(splits)),
            MIN_TILES=1,
            WINDOW="",
            HAS_SINKS=False,
            num_warps=8,
        )
    if max_query_len > 1:
        latent_prefill_kernel[((num_tokens // tiles.block_q + num_rows) * head_blocks,)](
            *rows, num_rows, scale, *strides, BLOCK_Q=tiles.block_q, **constants
        )
    return out
