"""Norms of q and k, rotary embedding and the write of k and v into their pages, as one operation."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.attention.kv_quantization import KVScales, PageLayout, write_quantized
from penstock.kernels.norms import NormWeights, norm_cpu, norm_reference


class QKNorms(NamedTuple):
    """The norms of q and k, before or after the rotation. If there are both, they have the same kind and dtype."""

    q: NormWeights | None = None  # weight and bias: [D]; [Hq, D] if the heads have their own; [Hq * D] if it spans all
    k: NormWeights | None = None  # the same, with Hk
    spans_all: bool = False  # all heads are normed as one vector, not each of them
    follow_rope: bool = False
    v: NormWeights | None = None  # of each head, without weights


def qk_norm_rope_write(
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
    """Norm and rotate q and k (Su et al., 2021; the half-split layout of transformers' `rotate_half`), store k and v.

    Args:
        qkv: [T, (Hq + 2 * Hk) * D], the fused projection: all q heads, all k heads, all v heads.
        positions: [T] int32 or int64, the row of `cos_sin` for each token; None if `cos_sin` has a row per token.
        cos_sin: [max_pos or T, rotary_dim] fp32, cosines in the first half of a row, sines in the second.
            rotary_dim <= D; the rest of a head is not rotated. None if nothing is.
        norms: of q and k.
        k_pages: [num_pages, Hk, page_size, D], written. With a layout uint8[num_pages, Hk, head bytes].
        v_pages: the same shape, written.
        slot_mapping: [T] int32 or int64; a negative slot writes nothing.
        q_scale: fp32 [T], multiplies each token's q after everything else (see `query_growth`).
        writes: False if `qkv` has only q heads, so that nothing is stored.
        layout: of quantized pages.
        kv_scales: the checkpoint's scales for quantized pages; None: each head of each token has its own.

    Returns:
        q: [T, Hq, D], normed and rotated. (`qkv` may be overwritten.)
    """
    num_kv_heads, head_dim = k_pages.shape[1] * writes, k_pages.shape[3] if layout is None else layout.head_dim
    if qkv.ndim != 2 or qkv.shape[1] % head_dim or qkv.shape[1] // head_dim <= 2 * num_kv_heads:
        raise ValueError(f"qkv {tuple(qkv.shape)} does not fit pages {tuple(k_pages.shape)}")
    if v_pages.shape != k_pages.shape or slot_mapping.shape[0] != qkv.shape[0]:
        raise ValueError(f"pages {tuple(v_pages.shape)} or slots {tuple(slot_mapping.shape)} do not fit")
    if cos_sin is not None:
        if cos_sin.shape[1] > head_dim or cos_sin.shape[1] % 2:
            raise ValueError(f"cos_sin {tuple(cos_sin.shape)} does not fit heads of {head_dim}")
        if positions is None and cos_sin.shape[0] != qkv.shape[0]:
            raise ValueError(f"without positions, cos_sin needs one row per token, got {tuple(cos_sin.shape)}")
    if qkv.is_cuda:
        from penstock.kernels.triton.attention.qk_norm_rope_write import qk_norm_rope_write_triton

        return qk_norm_rope_write_triton(
            *(qkv, positions, cos_sin, norms, k_pages, v_pages, slot_mapping, q_scale),
            writes=writes,
            layout=layout,
            kv_scales=kv_scales,
        )
    kept = slot_mapping >= 0
    page_size = k_pages.shape[2] if layout is None else layout.page_size
    cells = slot_cells(slot_mapping[kept], k_pages.shape[1], page_size)
    return qk_norm_rope_write_cpu(
        *(qkv, positions, cos_sin, norms, k_pages, v_pages, cells, q_scale, kept),
        writes=writes,
        layout=layout,
        kv_scales=kv_scales,
    )


def qk_norm_rope_write_cpu(
    qkv: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    norms: QKNorms,
    k_pages: Tensor,
    v_pages: Tensor,
    cells: Tensor,
    q_scale: Tensor | None = None,
    kept: Tensor | None = None,
    *,
    writes: bool = True,
    layout: PageLayout | None = None,
    kv_scales: KVScales | None = None,
) -> Tensor:
    """Like `qk_norm_rope_write`, with the result of `slot_cells`; `kept` says which tokens have a slot."""
    num_kv_heads, head_dim = k_pages.shape[1] * writes, k_pages.shape[3] if layout is None else layout.head_dim
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_q_heads = heads.shape[1] - 2 * num_kv_heads
    rows = cos_sin if cos_sin is None or positions is None else cos_sin.index_select(0, positions)
    if norms.q is None and norms.k is None:
        # q and k rotate in one pass, because they are adjacent in the fused projection.
        both = heads[:, : num_q_heads + num_kv_heads]
        rotated = both if rows is None else rotate(both, rows)
        q, k = rotated[:, :num_q_heads], rotated[:, num_q_heads:]
    else:
        q = _norm_and_rotate(heads[:, :num_q_heads], rows, norms.q, norms)
        k = _norm_and_rotate(heads[:, num_q_heads : num_q_heads + num_kv_heads], rows, norms.k, norms)
    if q_scale is not None:
        q = (q * q_scale[:, None, None]).to(q.dtype)
    if not writes:
        return q
    v = heads[:, num_q_heads + num_kv_heads :]
    if norms.v is not None:
        v = norm_cpu(v, norms.v)
    if kept is not None:
        k, v = k[kept], v[kept]
    k, v = k.reshape(-1, head_dim), v.reshape(-1, head_dim)
    if layout is not None:
        write_quantized(k_pages, layout, cells, k, None if kv_scales is None else kv_scales.k)
        write_quantized(v_pages, layout, cells, v, None if kv_scales is None else kv_scales.v)
    else:
        k_pages.view(-1, head_dim).index_copy_(0, cells, k)
        v_pages.view(-1, head_dim).index_copy_(0, cells, v)
    return q


def slot_cells(slot_mapping: Tensor, num_kv_heads: int, page_size: int) -> Tensor:
    """Indices of the tokens' heads in a layer's pages seen as [num_pages * Hk * page_size, D]; the same for all layers.

    Args:
        slot_mapping: [T], none negative.
        num_kv_heads: Hk.
        page_size: tokens per page.

    Returns:
        int64 [T * Hk].
    """
    slots = slot_mapping.long()
    offsets = slots.remainder(page_size)
    first = (slots - offsets).mul_(num_kv_heads).add_(offsets)  # slots - offsets = page_id * page_size
    return (first[:, None] + torch.arange(num_kv_heads, device=slots.device) * page_size).view(-1)


def query_growth(positions: Tensor, beta: float, length: float, shift: int = 0) -> Tensor:
    """fp32 [T], factors of queries at `positions` [T]: 1 + beta * log(1 + floor((p + shift) / length))."""
    return positions.float().add_(shift).div_(length).floor_().log1p_().mul_(beta).add_(1.0)


def qk_norm_rope_write_reference(
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
    """Token by token; rotation in fp32. Does not change `qkv`, writes the pages."""
    num_kv_heads = k_pages.shape[1] * writes
    page_size, head_dim = k_pages.shape[2:] if layout is None else layout[1:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_q_heads = heads.shape[1] - 2 * num_kv_heads
    out = torch.empty(qkv.shape[0], num_q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    for t in range(qkv.shape[0]):
        row = None if cos_sin is None else cos_sin[t if positions is None else int(positions[t])]
        q, k, v = heads[t].split((num_q_heads, num_kv_heads, num_kv_heads))
        q, k = _reference_heads(q, row, norms.q, norms), _reference_heads(k, row, norms.k, norms)
        out[t] = q if q_scale is None else q * q_scale[t]
        slot = int(slot_mapping[t])
        if slot >= 0 and writes:
            v = v if norms.v is None else norm_reference(v, norms.v)
            if layout is not None:
                cells = slot_cells(slot_mapping[t : t + 1], num_kv_heads, page_size)
                write_quantized(k_pages, layout, cells, k, None if kv_scales is None else kv_scales.k)
                write_quantized(v_pages, layout, cells, v, None if kv_scales is None else kv_scales.v)
                continue
            k_pages[slot // page_size, :, slot % page_size] = k
            v_pages[slot // page_size, :, slot % page_size] = v
    return out


def _reference_heads(x: Tensor, row: Tensor | None, weights: NormWeights | None, norms: QKNorms) -> Tensor:
    """The q or k heads [h, D] of one token."""

    def normed(x: Tensor) -> Tensor:
        if weights is None:
            return x
        return norm_reference(x.flatten() if norms.spans_all else x, weights).view(x.shape)

    if not norms.follow_rope:
        x = normed(x)
    if row is not None:
        half = row.shape[0] // 2
        cos, sin = row.split(half)
        first, second, rest = x.float().split((half, half, x.shape[1] - 2 * half), dim=1)
        x = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=1).to(x.dtype)
    return normed(x) if norms.follow_rope else x


def _norm_and_rotate(x: Tensor, rows: Tensor | None, weights: NormWeights | None, norms: QKNorms) -> Tensor:
    """x [T, h, D], rows [T, rotary_dim] fp32 -> [T, h, D] in the dtype of x."""
    if weights is None:
        return x if rows is None else rotate(x, rows)
    if norms.follow_rope and rows is not None:
        x, rows = rotate(x, rows), None
    normed = norm_cpu(x.flatten(1), weights).view(x.shape) if norms.spans_all else norm_cpu(x, weights)
    return normed if rows is None else rotate(normed, rows)


def rotate(x: Tensor, rows: Tensor) -> Tensor:
    """x [T, h, D], rows [T, rotary_dim] fp32 -> [T, h, D] in the dtype of x."""
    half = rows.shape[1] // 2
    rows = rows.unsqueeze(1)
    cos, sin = rows[..., :half], rows[..., half:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = x[..., :half], x[..., half : 2 * half]
    if x.dtype == torch.float32:
        torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1.0)
        torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    else:
        out[..., :half] = first * cos - second * sin
        out[..., half : 2 * half] = second * cos + first * sin
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
