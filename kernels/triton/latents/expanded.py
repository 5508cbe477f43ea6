"""Latent attention, the expanded way: causal attention of chunks of queries over each head's own keys and values.

FlashAttention-2's schedule over a ragged batch, as in `attention/prefill.py`. Keys and values are contiguous, and the
rotated part of a key is the same for all heads.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.attention.prefill import find_row
from penstock.kernels.triton.device import DeviceFacts, device_facts, next_power_of_two
from penstock.kernels.triton.latents.tiles import fold_scores


class ExpandedTiles(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def expanded_tiles(facts: DeviceFacts, largest_dim: int, itemsize: int) -> ExpandedTiles:
    """Tiles for heads with `largest_dim` numbers in their largest part; not tuned on a GPU yet."""
    if itemsize == 4:  # exact fp32 products run on the plain cores: for tests and parity, not for speed
        return ExpandedTiles(16, 16, 4, 1)
    if largest_dim > 128:
        return ExpandedTiles(64, 32, 8, 2)
    return ExpandedTiles(128, 64 if facts.is_large else 32, 8, 2)


@triton.jit
def fold_heads(
    acc,
    l_i,
    m_i,
    q,
    q_rotated,
    q_pos,
    kv_ptr,
    rotated_ptr,
    lo,
    hi,
    end,
    stride_kt,
    stride_rt,
    scale,
    NOPE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHECK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold positions [lo, hi) into (acc, l_i, m_i). CHECK masks positions after a query, and from `end` on."""
    d_offs = tl.arange(0, BLOCK_D)
    p_offs = tl.arange(0, BLOCK_P)
    v_offs = tl.arange(0, BLOCK_V)
    for n_first in tl.range(lo, hi, BLOCK_N):
        n_offs = n_first + tl.arange(0, BLOCK_N)
        inside = (n_offs < end)[:, None] if CHECK else (n_offs >= 0)[:, None]
        rows = kv_ptr + n_offs.to(tl.int64)[:, None] * stride_kt
        k = tl.load(rows + d_offs[None, :], mask=inside & (d_offs < NOPE)[None, :], other=0.0)
        at = rotated_ptr + n_offs.to(tl.int64)[:, None] * stride_rt + p_offs[None, :]
        rotated = tl.load(at, mask=inside & (p_offs < ROPE)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = tl.dot(q_rotated, tl.trans(rotated), s, input_precision=PRECISION)
        keep = (n_offs[None, :] <= q_pos[:, None]) if CHECK else (n_offs[None, :] >= 0)
        p, alpha, l_i, m_i = fold_scores(s, keep, l_i, m_i, scale)
        v = tl.load(rows + NOPE + v_offs[None, :], mask=inside & (v_offs < VALUE)[None, :], other=0.0)
        acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, l_i, m_i


@triton.jit(do_not_specialize=["num_rows"])  # it varies from step to step
def expanded_kernel(
    q_ptr,
    kv_ptr,
    rotated_ptr,
    query_start_loc_ptr,
    key_start_loc_ptr,
    out_ptr,
    num_rows,
    num_heads,
    scale,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_rt,
    stride_ot,
    stride_oh,
    NOPE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles * heads,)."""
    head = tl.program_id(0) % num_heads
    # The last tiles of a row see the most keys. They start first, so that no long one remains for the end.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // num_heads
    row = find_row(query_start_loc_ptr, tile, num_rows, BLOCK_M)
    q_first = tl.load(query_start_loc_ptr + row)
    q_len = tl.load(query_start_loc_ptr + row + 1) - q_first
    q_block = (tile - (q_first // BLOCK_M + row)) * BLOCK_M
    if q_block >= q_len:
        return
    k_first = tl.load(key_start_loc_ptr + row).to(tl.int64)
    seq_len = (tl.load(key_start_loc_ptr + row + 1) - k_first).to(tl.int32)

    q_idx = q_block + tl.arange(0, BLOCK_M)
    d_offs = tl.arange(0, BLOCK_D)
    p_offs = tl.arange(0, BLOCK_P)
    v_offs = tl.arange(0, BLOCK_V)
    is_query = (q_idx < q_len)[:, None]
    tokens = (q_first + q_idx).to(tl.int64)
    q_rows = q_ptr + (tokens * stride_qt)[:, None] + head * stride_qh
    q = tl.load(q_rows + d_offs[None, :], mask=is_query & (d_offs < NOPE)[None, :], other=0.0)
    q_rotated = tl.load(q_rows + NOPE + p_offs[None, :], mask=is_query & (p_offs < ROPE)[None, :], other=0.0)
    first_pos = seq_len - q_len + q_block
    q_pos = seq_len - q_len + q_idx
    end = tl.minimum(first_pos + BLOCK_M, seq_len)
    full = (first_pos + 1) // BLOCK_N * BLOCK_N  # earlier tiles are visible to every query of the block
    kv_base = kv_ptr + k_first * stride_kt + head * stride_kh
    rotated_base = rotated_ptr + k_first * stride_rt

    acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    acc, l_i, m_i = fold_heads(
        acc, l_i, m_i, q, q_rotated, q_pos, kv_base, rotated_base, 0, full, end, stride_kt, stride_rt, scale,
        NOPE, BLOCK_D, ROPE, BLOCK_P, VALUE, BLOCK_V, BLOCK_N, False, PRECISION,
    )  # fmt: skip
    acc, l_i, m_i = fold_heads(
        acc, l_i, m_i, q, q_rotated, q_pos, kv_base, rotated_base, full, end, end, stride_kt, stride_rt, scale,
        NOPE, BLOCK_D, ROPE, BLOCK_P, VALUE, BLOCK_V, BLOCK_N, True, PRECISION,
    )  # fmt: skip
    out_ptrs = out_ptr + (tokens * stride_ot)[:, None] + head * stride_oh + v_offs[None, :]
    mean = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(out_ptrs, mean.to(out_ptr.dtype.element_ty), mask=is_query & (v_offs < VALUE)[None, :])


def expanded_attention_triton(
    q: Tensor,
    kv: Tensor,
    rotated: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    scale: float,
    max_query_len: int,
    out: Tensor,
    tiles: ExpandedTiles | None = None,
) -> None:
    """Arguments as `penstock.kernels.latents.attention.expanded_attention`; `tiles` override the rule above."""
    if q.shape[0] == 0:
        return
    num_rows, rope_dim, v_dim = query_start_loc.shape[0] - 1, rotated.shape[1], out.shape[2]
    nope_dim = q.shape[2] - rope_dim
    if tiles is None:
        tiles = expanded_tiles(device_facts(q.device), max(nope_dim, v_dim), q.element_size())
    expanded_kernel[((q.shape[0] // tiles.block_m + num_rows) * q.shape[1],)](
        q,
        kv,
        rotated,
        query_start_loc,
        key_start_loc,
        out,
        num_rows,
        q.shape[1],
        scale,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        kv.stride(1),
        rotated.stride(0),
        out.stride(0),
        out.stride(1),
        NOPE=nope_dim,
        BLOCK_D=max(16, next_power_of_two(nope_dim)),
        ROPE=rope_dim,
        BLOCK_P=max(16, next_power_of_two(rope_dim)),
        VALUE=v_dim,
        BLOCK_V=max(16, next_power_of_two(v_dim)),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",  # fp32 is for tokens equal to other programs'
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
