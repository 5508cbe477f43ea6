"""RMSNorm of a latent, rotary embedding beside it, and the write of both into their page, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import ceil_div, next_power_of_two


@triton.jit
def turn_pairs(from_ptrs, to_ptrs, mask, cos, sin, HALF: tl.constexpr):
    """Rotate pairs of numbers that are HALF apart, at these pointers."""
    raw1 = tl.load(from_ptrs, mask=mask, other=0.0)
    raw2 = tl.load(from_ptrs + HALF, mask=mask, other=0.0)
    x1 = raw1.to(tl.float32)
    x2 = raw2.to(tl.float32)
    dtype = to_ptrs.dtype.element_ty
    tl.store(to_ptrs, (x1 * cos - x2 * sin).to(raw1.dtype).to(dtype), mask=mask)
    tl.store(to_ptrs + HALF, (x2 * cos + x1 * sin).to(raw1.dtype).to(dtype), mask=mask)


@triton.jit
def latent_write_kernel(
    kv_ptr,
    q_ptr,
    positions_ptr,
    cos_sin_ptr,
    weight_ptr,
    pages_ptr,
    slots_ptr,
    eps,
    stride_xt,
    stride_qt,
    stride_qh,
    stride_cs,
    stride_page,
    stride_token,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    ROTATES: tl.constexpr,
):
    """Grid (T, 1 + blocks of q heads): first a token's latent and key, then its queries, BLOCK_H heads at a time."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    half = tl.arange(0, BLOCK_HALF)
    position = token
    if HAS_POSITIONS:
        position = tl.load(positions_ptr + token).to(tl.int64)
    if ROTATES:
        cs_row = cos_sin_ptr + position * stride_cs
        cos = tl.load(cs_row + half, mask=half < HALF, other=0.0)
        sin = tl.load(cs_row + HALF + half, mask=half < HALF, other=0.0)
    else:
        cos, sin = tl.full((BLOCK_HALF,), 1.0, tl.float32), tl.zeros((BLOCK_HALF,), tl.float32)
    if block == 0:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            r_offs = tl.arange(0, BLOCK_R)
            entry = pages_ptr + slot // PAGE_SIZE * stride_page + slot % PAGE_SIZE * stride_token
            latent_ptr = kv_ptr + token * stride_xt
            raw = tl.load(latent_ptr + r_offs, mask=r_offs < RANK, other=0.0)
            x = raw.to(tl.float32)
            norm = 1.0 / tl.sqrt(tl.sum(x * x, 0) / RANK + eps)
            weight = tl.load(weight_ptr + r_offs, mask=r_offs < RANK, other=0.0)
            # Rounded to the activations' dtype after the norm and after the weight, as transformers does.
            latent = ((x * norm).to(raw.dtype) * weight).to(raw.dtype)
            tl.store(entry + r_offs, latent.to(pages_ptr.dtype.element_ty), mask=r_offs < RANK)
            turn_pairs(latent_ptr + RANK + half, entry + RANK + half, half < HALF, cos, sin, HALF)
    else:
        heads = (block - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        at = q_ptr + token * stride_qt + NOPE + heads[:, None] * stride_qh + half[None, :]
        turn_pairs(at, at, (heads < NUM_HEADS)[:, None] & (half < HALF)[None, :], cos[None, :], sin[None, :], HALF)


def latent_write_triton(
    kv: Tensor,
    q: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    weight: Tensor,
    eps: float,
    pages: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Arguments as `penstock.kernels.latents.write.latent_write`."""
    num_tokens, num_heads, dim = q.shape
    if not num_tokens:
        return
    rope_dim = kv.shape[1] - weight.shape[0]
    # Few tokens: many small programs, for latency. Many tokens: fewer, larger programs.
    block_h = next_power_of_two(min(num_heads, 8 if num_tokens <= 64 else 32))
    of_queries = 0 if cos_sin is None else ceil_div(num_heads, block_h)
    latent_write_kernel[(num_tokens, 1 + of_queries)](
        kv,
        q,
        slot_mapping if positions is None else positions,
        weight if cos_sin is None else cos_sin,
        weight,
        pages,
        slot_mapping,
        eps,
        kv.stride(0),
        q.stride(0),
        q.stride(1),
        0 if cos_sin is None else cos_sin.stride(0),
        pages.stride(0),
        pages.stride(2),
        NUM_HEADS=num_heads,
        NOPE=dim - rope_dim,
        RANK=weight.shape[0],
        BLOCK_R=next_power_of_two(weight.shape[0]),
        HALF=rope_dim // 2,
        BLOCK_HALF=next_power_of_two(rope_dim // 2),
        PAGE_SIZE=pages.shape[2],
        BLOCK_H=block_h,
        HAS_POSITIONS=positions is not None,
        ROTATES=cos_sin is not None,
        num_warps=2,
        enable_fp_fusion=False,  # as in `qk_norm_rope_write_triton`
    )
