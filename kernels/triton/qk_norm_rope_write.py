"""Per-head q/k RMSNorm, rotary embedding and the write of k and v into their pages, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import ceil_div, next_power_of_two


@triton.jit
def rope_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_pages_ptr,
    v_pages_ptr,
    slots_ptr,
    out_ptr,
    eps,
    stride_xt,
    stride_cs,
    stride_kp,
    stride_kh,
    stride_kt,
    stride_vp,
    stride_vh,
    stride_vt,
    stride_ot,
    stride_oh,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
):
    """Grid (T, Q_BLOCKS + KV blocks): BLOCK_H q heads, or BLOCK_H kv heads, of one token.

    A head is read as its two rotated halves [0, HALF) and [HALF, 2 * HALF) and the REST behind them.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    is_q = block < Q_BLOCKS
    heads = tl.where(is_q, block, block - Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = heads < tl.where(is_q, NUM_Q, NUM_KV)
    half = tl.arange(0, BLOCK_HALF)
    rest = tl.arange(0, BLOCK_REST)
    half_ok = head_ok[:, None] & (half < HALF)[None, :]
    rest_ok = head_ok[:, None] & (rest < REST)[None, :]

    x_row = qkv_ptr + token * stride_xt + tl.where(is_q, 0, NUM_Q * HEAD_DIM)
    x_heads = x_row + heads[:, None] * HEAD_DIM
    raw1 = tl.load(x_heads + half[None, :], mask=half_ok, other=0.0)
    raw2 = tl.load(x_heads + HALF + half[None, :], mask=half_ok, other=0.0)
    x1 = raw1.to(tl.float32)
    x2 = raw2.to(tl.float32)
    if REST > 0:
        x3 = tl.load(x_heads + 2 * HALF + rest[None, :], mask=rest_ok, other=0.0).to(tl.float32)

    if Q_NORM or K_NORM:
        squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
        if REST > 0:
            squares += tl.sum(x3 * x3, 1)
        norm = 1.0 / tl.sqrt(squares / HEAD_DIM + eps)
        w_ptr = tl.where(is_q, q_weight_ptr.to(tl.int64), k_weight_ptr.to(tl.int64)).to(q_weight_ptr.dtype)
        applies = tl.where(is_q, Q_NORM, K_NORM)
        w1 = tl.load(w_ptr + half, mask=(half < HALF) & applies, other=1.0)
        w2 = tl.load(w_ptr + HALF + half, mask=(half < HALF) & applies, other=1.0)
        norm = tl.where(applies, norm, 1.0)[:, None]
        # Rounded to the activations' dtype after the norm and after the weight, as transformers does.
        x1 = ((x1 * norm).to(raw1.dtype) * w1[None, :]).to(raw1.dtype).to(tl.float32)
        x2 = ((x2 * norm).to(raw1.dtype) * w2[None, :]).to(raw1.dtype).to(tl.float32)
        if REST > 0:
            w3 = tl.load(w_ptr + 2 * HALF + rest, mask=(rest < REST) & applies, other=1.0)
            x3 = ((x3 * norm).to(raw1.dtype) * w3[None, :]).to(raw1.dtype).to(tl.float32)

    position = token
    if HAS_POSITIONS:
        position = tl.load(positions_ptr + token).to(tl.int64)
    cs_row = cos_sin_ptr + position * stride_cs
    cos = tl.load(cs_row + half, mask=half < HALF, other=0.0)[None, :]
    sin = tl.load(cs_row + HALF + half, mask=half < HALF, other=0.0)[None, :]
    y1 = (x1 * cos - x2 * sin).to(raw1.dtype)
    y2 = (x2 * cos + x1 * sin).to(raw1.dtype)

    if is_q:
        o_heads = out_ptr + token * stride_ot + heads[:, None] * stride_oh
        tl.store(o_heads + half[None, :], y1, mask=half_ok)
        tl.store(o_heads + HALF + half[None, :], y2, mask=half_ok)
        if REST > 0:
            tl.store(o_heads + 2 * HALF + rest[None, :], x3.to(raw1.dtype), mask=rest_ok)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            page = slot // PAGE_SIZE
            offset = slot % PAGE_SIZE
            k_heads = k_pages_ptr + page * stride_kp + offset * stride_kt + heads[:, None] * stride_kh
            v_heads = v_pages_ptr + page * stride_vp + offset * stride_vt + heads[:, None] * stride_vh
            v_src = x_heads + NUM_KV * HEAD_DIM
            v1 = tl.load(v_src + half[None, :], mask=half_ok, other=0.0)
            v2 = tl.load(v_src + HALF + half[None, :], mask=half_ok, other=0.0)
            # A quantized pool would quantize here.
            tl.store(k_heads + half[None, :], y1.to(k_pages_ptr.dtype.element_ty), mask=half_ok)
            tl.store(k_heads + HALF + half[None, :], y2.to(k_pages_ptr.dtype.element_ty), mask=half_ok)
            tl.store(v_heads + half[None, :], v1.to(v_pages_ptr.dtype.element_ty), mask=half_ok)
            tl.store(v_heads + HALF + half[None, :], v2.to(v_pages_ptr.dtype.element_ty), mask=half_ok)
            if REST > 0:
                v3 = tl.load(v_src + 2 * HALF + rest[None, :], mask=rest_ok, other=0.0)
                k3 = x3.to(k_pages_ptr.dtype.element_ty)
                tl.store(k_heads + 2 * HALF + rest[None, :], k3, mask=rest_ok)
                tl.store(v_heads + 2 * HALF + rest[None, :], v3.to(v_pages_ptr.dtype.element_ty), mask=rest_ok)


def qk_norm_rope_write_triton(
    qkv: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Arguments as `penstock.kernels.qk_norm_rope_write.qk_norm_rope_write`; returns q [T, Hq, D], contiguous."""
    num_tokens = qkv.shape[0]
    num_kv, page_size, head_dim = k_pages.shape[1], k_pages.shape[2], k_pages.shape[3]
    num_q = qkv.shape[1] // head_dim - 2 * num_kv
    out = torch.empty((num_tokens, num_q, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return out
    half = cos_sin.shape[1] // 2
    rest = head_dim - 2 * half
    # Few tokens: many small programs, for latency. Many: fewer, larger ones.
    block_h = next_power_of_two(min(max(num_q, num_kv), 4 if num_tokens <= 64 else 8))
    q_blocks = ceil_div(num_q, block_h)
    weights = [w for w in (q_weight, k_weight) if w is not None]
    unused = weights[0] if weights else cos_sin
    rope_kernel[(num_tokens, q_blocks + ceil_div(num_kv, block_h))](
        qkv,
        slot_mapping if positions is None else positions,
        cos_sin,
        unused if q_weight is None else q_weight,
        unused if k_weight is None else k_weight,
        k_pages,
        v_pages,
        slot_mapping,
        out,
        eps,
        qkv.stride(0),
        cos_sin.stride(0),
        k_pages.stride(0),
        k_pages.stride(1),
        k_pages.stride(2),
        v_pages.stride(0),
        v_pages.stride(1),
        v_pages.stride(2),
        out.stride(0),
        out.stride(1),
        NUM_Q=num_q,
        NUM_KV=num_kv,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_HALF=next_power_of_two(half),
        REST=rest,
        BLOCK_REST=next_power_of_two(rest),
        PAGE_SIZE=page_size,
        BLOCK_H=block_h,
        Q_BLOCKS=q_blocks,
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        HAS_POSITIONS=positions is not None,
        num_warps=1 if num_tokens <= 64 else 2,
    )
    return out
