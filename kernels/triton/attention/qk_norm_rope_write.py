"""Norms of q and k, rotary embedding and the write of k and v into their pages, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention.kv_quantization import KVScales, PageLayout
from penstock.kernels.attention.qk_norm_rope_write import QKNorms
from penstock.kernels.norms import NormWeights
from penstock.kernels.triton.attention.kv_tiles import block_of_head
from penstock.kernels.triton.attention.kv_write import store_heads, whole_heads
from penstock.kernels.triton.device import ceil_div, next_power_of_two


@triton.jit
def sums(x1, x2, x3, REST: tl.constexpr, ALL: tl.constexpr):
    """[BLOCK_H]: the sum over each head or, with ALL, the sum over all heads, for every head."""
    total = tl.sum(x1, 1) + tl.sum(x2, 1)
    if REST > 0:
        total += tl.sum(x3, 1)
    if ALL:
        total = tl.zeros_like(total) + tl.sum(total, 0)
    return total


@triton.jit
def weighted(
    x, offs, ok, weight_ptr, bias_ptr,
    DTYPE: tl.constexpr, KIND: tl.constexpr, WEIGHTS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One part of normed heads times its weights, rounded to DTYPE; returned as fp32."""
    if WEIGHTS != "":
        weight = tl.load(weight_ptr + offs, mask=ok, other=0.0)
        weight = weight[None, :] if WEIGHTS == "one" else weight
        if KIND == "rms":
            x = x.to(weight.dtype)
        x = x * weight
    if BIAS:
        bias = tl.load(bias_ptr + offs, mask=ok, other=0.0)
        x += bias[None, :] if WEIGHTS == "one" else bias
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def normed(
    x1, x2, x3, heads, half, rest, half_ok, rest_ok, weight_ptr, bias_ptr, width, eps,
    DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    KIND: tl.constexpr, ALL: tl.constexpr, WEIGHTS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The norm of heads in three parts, where masked elements are 0. Rounded as in transformers; returned as fp32."""
    if KIND == "layer":
        mean = (sums(x1, x2, x3, REST, ALL) / width)[:, None]
        x1 = tl.where(half_ok, x1 - mean, 0.0)
        x2 = tl.where(half_ok, x2 - mean, 0.0)
        x3 = tl.where(rest_ok, x3 - mean, 0.0) if REST > 0 else x3
    squares = sums(x1 * x1, x2 * x2, x3 * x3, REST, ALL)
    norm = (1.0 / tl.sqrt(squares / width + eps))[:, None]
    if WEIGHTS == "each":
        half_offs = heads[:, None] * HEAD_DIM + half[None, :]
        rest_offs = heads[:, None] * HEAD_DIM + 2 * HALF + rest[None, :]
    else:
        half_offs = half
        rest_offs = 2 * HALF + rest
        half_ok = half_offs < HALF
        rest_ok = rest_offs < HEAD_DIM
    x1 = weighted(x1 * norm, half_offs, half_ok, weight_ptr, bias_ptr, DTYPE, KIND, WEIGHTS, BIAS)
    x2 = weighted(x2 * norm, HALF + half_offs, half_ok, weight_ptr, bias_ptr, DTYPE, KIND, WEIGHTS, BIAS)
    if REST > 0:
        x3 = weighted(x3 * norm, rest_offs, rest_ok, weight_ptr, bias_ptr, DTYPE, KIND, WEIGHTS, BIAS)
    return x1, x2, x3


@triton.jit
def rope_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_bias_ptr,
    k_bias_ptr,
    q_scale_ptr,
    k_pages_ptr,
    v_pages_ptr,
    slots_ptr,
    out_ptr,
    q_eps,
    k_eps,
    v_eps,
    k_scale,
    v_scale,
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
    KIND: tl.constexpr,
    ALL: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM_LAST: tl.constexpr,
    ROTATE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    V_NORM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Grid (T, Q_BLOCKS + KV blocks): BLOCK_H q heads, or BLOCK_H kv heads, of one token.

    A head is read in three parts: its two rotated halves [0, HALF) and [HALF, 2 * HALF), and the REST after them. ALL:
    the norm spans all heads, which are then in one block. WEIGHTS: "one" for all heads, "each" head its own, "" for
    none. FORMAT: of quantized pages, or "" for pages of plain numbers. k_scale and v_scale: a checkpoint's, or None.
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
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    x1 = tl.load(x_heads + half[None, :], mask=half_ok, other=0.0).to(tl.float32)
    x2 = tl.load(x_heads + HALF + half[None, :], mask=half_ok, other=0.0).to(tl.float32)
    x3 = x1  # not used without a rest
    if REST > 0:
        x3 = tl.load(x_heads + 2 * HALF + rest[None, :], mask=rest_ok, other=0.0).to(tl.float32)

    if ROTATE:
        position = token
        if HAS_POSITIONS:
            position = tl.load(positions_ptr + token).to(tl.int64)
        cs_row = cos_sin_ptr + position * stride_cs
        cos = tl.load(cs_row + half, mask=half < HALF, other=0.0)[None, :]
        sin = tl.load(cs_row + HALF + half, mask=half < HALF, other=0.0)[None, :]
        if NORM_LAST:
            turned = (x1 * cos - x2 * sin).to(DTYPE).to(tl.float32)
            x2 = (x2 * cos + x1 * sin).to(DTYPE).to(tl.float32)
            x1 = turned

    if Q_NORM or K_NORM:
        applies = tl.where(is_q, Q_NORM, K_NORM)
        w_ptr = tl.where(is_q, q_weight_ptr.to(tl.int64), k_weight_ptr.to(tl.int64)).to(q_weight_ptr.dtype)
        b_ptr = tl.where(is_q, q_bias_ptr.to(tl.int64), k_bias_ptr.to(tl.int64)).to(q_bias_ptr.dtype)
        width = HEAD_DIM * tl.where(is_q, NUM_Q, NUM_KV) if ALL else HEAD_DIM
        n1, n2, n3 = normed(
            x1, x2, x3, heads, half, rest, half_ok & applies, rest_ok & applies, w_ptr, b_ptr, width,
            tl.where(is_q, q_eps, k_eps), DTYPE, HEAD_DIM, HALF, REST, KIND, ALL, WEIGHTS, BIAS,
        )  # fmt: skip
        x1 = tl.where(applies, n1, x1)
        x2 = tl.where(applies, n2, x2)
        x3 = tl.where(applies, n3, x3)

    y1 = x1
    y2 = x2
    if ROTATE and not NORM_LAST:
        y1 = (x1 * cos - x2 * sin).to(DTYPE)
        y2 = (x2 * cos + x1 * sin).to(DTYPE)

    if is_q:
        if HAS_SCALE:
            q_scale = tl.load(q_scale_ptr + token)
            y1 = y1.to(tl.float32) * q_scale
            y2 = y2.to(tl.float32) * q_scale
            x3 = x3 * q_scale
        o_heads = out_ptr + token * stride_ot + heads[:, None] * stride_oh
        tl.store(o_heads + half[None, :], y1.to(DTYPE), mask=half_ok)
        tl.store(o_heads + HALF + half[None, :], y2.to(DTYPE), mask=half_ok)
        if REST > 0:
            tl.store(o_heads + 2 * HALF + rest[None, :], x3.to(DTYPE), mask=rest_ok)
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
            if V_NORM:
                f1 = v1.to(tl.float32)
                f2 = v2.to(tl.float32)
                squares = tl.sum(f1 * f1, 1) + tl.sum(f2 * f2, 1)
                if REST > 0:
                    f3 = tl.load(v_src + 2 * HALF + rest[None, :], mask=rest_ok, other=0.0).to(tl.float32)
                    squares += tl.sum(f3 * f3, 1)
                v_norm = (1.0 / tl.sqrt(squares / HEAD_DIM + v_eps))[:, None]
                v1 = (f1 * v_norm).to(DTYPE)
                v2 = (f2 * v_norm).to(DTYPE)
            v3 = v1  # not used without a rest
            if REST > 0:
                v3 = tl.load(v_src + 2 * HALF + rest[None, :], mask=rest_ok, other=0.0)
                if V_NORM:
                    v3 = (v3.to(tl.float32) * v_norm).to(DTYPE)
            if FORMAT == "":
                PAGE_TYPE: tl.constexpr = k_pages_ptr.dtype.element_ty
                tl.store(k_heads + half[None, :], y1.to(PAGE_TYPE), mask=half_ok)
                tl.store(k_heads + HALF + half[None, :], y2.to(PAGE_TYPE), mask=half_ok)
                tl.store(v_heads + half[None, :], v1.to(PAGE_TYPE), mask=half_ok)
                tl.store(v_heads + HALF + half[None, :], v2.to(PAGE_TYPE), mask=half_ok)
                if REST > 0:
                    tl.store(k_heads + 2 * HALF + rest[None, :], x3.to(PAGE_TYPE), mask=rest_ok)
                    tl.store(v_heads + 2 * HALF + rest[None, :], v3.to(PAGE_TYPE), mask=rest_ok)
            else:
                k = whole_heads(y1, y2, x3, HALF, BLOCK_HALF, REST, BLOCK_D).to(DTYPE).to(tl.float32)
                v = whole_heads(v1, v2, v3, HALF, BLOCK_HALF, REST, BLOCK_D).to(tl.float32)
                k_ptrs = k_pages_ptr + page * stride_kp + heads * stride_kh
                v_ptrs = v_pages_ptr + page * stride_vp + heads * stride_vh
                store_heads(k_ptrs, offset, k, head_ok, k_scale, HEAD_DIM, BLOCK_D, PAGE_SIZE, FORMAT)
                store_heads(v_ptrs, offset, v, head_ok, v_scale, HEAD_DIM, BLOCK_D, PAGE_SIZE, FORMAT)


def qk_norm_rope_write_triton(
    qkv: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    norms: QKNorms,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    q_scale: Tensor | None = None,
    *,
    writes: bool = True,
    layout: PageLayout | None = None,
    kv_scales: KVScales | None = None,
) -> Tensor:
    """Arguments as `kernels/attention/qk_norm_rope_write.py` has them; returns q [T, Hq, D], contiguous."""
    num_tokens = qkv.shape[0]
    num_kv = k_pages.shape[1] * writes
    page_size, head_dim = k_pages.shape[2:] if layout is None else layout[1:]
    num_q = qkv.shape[1] // head_dim - 2 * num_kv
    out = torch.empty((num_tokens, num_q, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return out
    half = (head_dim if cos_sin is None else cos_sin.shape[1]) // 2
    rest = head_dim - 2 * half
    # Few tokens: many small programs, for latency. Many tokens: fewer, larger programs.
    block_h = next_power_of_two(min(max(num_q, num_kv), 4 if num_tokens <= 64 else 8))
    num_warps = 1 if num_tokens <= 64 else 2
    spans_all = norms.spans_all and (norms.q is not None or norms.k is not None)
    if spans_all:
        block_h, num_warps = next_power_of_two(max(num_q, num_kv)), 8
    # For quantized pages, parts of heads are gathered. Triton 3.6 and 3.7 compile that only if each warp has a row, and
    # each thread a number. Other pages get as many warps, so that sums have the same order.
    narrowest = min(2 * next_power_of_two(half), next_power_of_two(rest) if rest else head_dim)
    num_warps = max(1, min(num_warps, block_h, block_h * narrowest // 32))
    q_blocks = ceil_div(num_q, block_h)
    q_weights, k_weights = norms.q or norms.k or NormWeights(), norms.k or norms.q or NormWeights()
    form = _form(q_weights, spans_all)
    if form != _form(k_weights, spans_all):
        raise ValueError(f"the norms of q and k differ: {form}, {_form(k_weights, spans_all)}")
    rope_kernel[(num_tokens, q_blocks + ceil_div(num_kv, block_h))](
        qkv,
        slot_mapping if positions is None else positions,
        out if cos_sin is None else cos_sin,
        out if q_weights.weight is None else q_weights.weight,
        out if k_weights.weight is None else k_weights.weight,
        out if q_weights.bias is None else q_weights.bias,
        out if k_weights.bias is None else k_weights.bias,
        out if q_scale is None else q_scale,
        k_pages,
        v_pages,
        slot_mapping,
        out,
        q_weights.eps,
        k_weights.eps,
        0.0 if norms.v is None else norms.v.eps,
        None if kv_scales is None or layout is None else kv_scales.k,
        None if kv_scales is None or layout is None else kv_scales.v,
        qkv.stride(0),
        0 if cos_sin is None else cos_sin.stride(0),
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
        Q_NORM=norms.q is not None,
        K_NORM=norms.k is not None,
        KIND=q_weights.kind,
        ALL=spans_all,
        WEIGHTS=form[1],
        BIAS=form[2],
        NORM_LAST=norms.follow_rope and cos_sin is not None,
        ROTATE=cos_sin is not None,
        HAS_POSITIONS=positions is not None,
        HAS_SCALE=q_scale is not None,
        V_NORM=norms.v is not None,
        BLOCK_D=block_of_head(head_dim, layout),
        FORMAT="" if layout is None else layout.format.name,
        num_warps=num_warps,
        # Which of two products is fused with their sum differs between forms; then so would the last bits of keys.
        enable_fp_fusion=False,
    )
    return out


def _form(weights: NormWeights, spans_all: bool) -> tuple[str, str, bool, torch.dtype | None]:
    """(kind, whether heads share a weight, whether there is a bias, dtype)."""
    weight = weights.weight
    if weight is None:
        return weights.kind, "", False, None
    is_each = spans_all or weight.ndim == 2
    return weights.kind, "each" if is_each else "one", weights.bias is not None, weight.dtype
