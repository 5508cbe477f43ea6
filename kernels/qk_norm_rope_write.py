"""Per-head q/k RMSNorm, rotary embedding and the write of k and v into their pages, as one operation."""

import torch
from torch import Tensor

from penstock.kernels.norms import NormWeights, norm_cpu, norm_reference


def qk_norm_rope_write(
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
    """Rotate q and k (Su et al., 2021; the half-split layout of transformers' `rotate_half`), store k and v.

    Args:
        qkv: [T, (Hq + 2 * Hk) * D], the fused projection: all q heads, all k heads, all v heads.
        positions: [T] int32 or int64, the row of `cos_sin` for each token; None if `cos_sin` has a row per token.
        cos_sin: [max_pos or T, rotary_dim] fp32, cosines in the first half of a row, sines in the second.
            rotary_dim <= D; the rest of a head is not rotated.
        q_weight: [D] weight of the per-head RMSNorm before the rotation, or None.
        k_weight: [D], or None.
        eps: of those norms.
        k_pages: [num_pages, Hk, page_size, D], written.
        v_pages: the same shape, written.
        slot_mapping: [T] int32 or int64; a negative slot writes nothing.

    Returns:
        q: [T, Hq, D], normed and rotated. (`qkv` may be overwritten.)
    """
    num_kv_heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    if qkv.ndim != 2 or qkv.shape[1] % head_dim or qkv.shape[1] // head_dim <= 2 * num_kv_heads:
        raise ValueError(f"qkv {tuple(qkv.shape)} does not fit pages {tuple(k_pages.shape)}")
    if cos_sin.shape[1] > head_dim or cos_sin.shape[1] % 2:
        raise ValueError(f"cos_sin {tuple(cos_sin.shape)} does not fit heads of {head_dim}")
    if v_pages.shape != k_pages.shape or slot_mapping.shape[0] != qkv.shape[0]:
        raise ValueError(f"pages {tuple(v_pages.shape)} or slots {tuple(slot_mapping.shape)} do not fit")
    if positions is None and cos_sin.shape[0] != qkv.shape[0]:
        raise ValueError(f"without positions, cos_sin needs one row per token, got {tuple(cos_sin.shape)}")
    if qkv.is_cuda:
        from penstock.kernels.triton.qk_norm_rope_write import qk_norm_rope_write_triton

        return qk_norm_rope_write_triton(
            qkv, positions, cos_sin, q_weight, k_weight, eps, k_pages, v_pages, slot_mapping
        )
    kept = slot_mapping >= 0
    cells = slot_cells(slot_mapping[kept], num_kv_heads, k_pages.shape[2])
    return qk_norm_rope_write_cpu(qkv, positions, cos_sin, q_weight, k_weight, eps, k_pages, v_pages, cells, kept)


def qk_norm_rope_write_cpu(
    qkv: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    k_pages: Tensor,
    v_pages: Tensor,
    cells: Tensor,
    kept: Tensor | None = None,
) -> Tensor:
    """Like `qk_norm_rope_write`, with the result of `slot_cells`; `kept` says which tokens have a slot."""
    num_kv_heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_q_heads = heads.shape[1] - 2 * num_kv_heads
    rows = cos_sin if positions is None else cos_sin.index_select(0, positions)
    if q_weight is None and k_weight is None:
        # q and k rotate in one pass: they are neighbours in the fused projection.
        rotated = rotate(heads[:, : num_q_heads + num_kv_heads], rows)
        q, k = rotated[:, :num_q_heads], rotated[:, num_q_heads:]
    else:
        q, k = heads[:, :num_q_heads], heads[:, num_q_heads : num_q_heads + num_kv_heads]
        q = rotate(q if q_weight is None else norm_cpu(q, NormWeights(q_weight, eps)), rows)
        k = rotate(k if k_weight is None else norm_cpu(k, NormWeights(k_weight, eps)), rows)
    v = heads[:, num_q_heads + num_kv_heads :]
    if kept is not None:
        k, v = k[kept], v[kept]
    k_pages.view(-1, head_dim).index_copy_(0, cells, k.reshape(-1, head_dim))
    v_pages.view(-1, head_dim).index_copy_(0, cells, v.reshape(-1, head_dim))
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
    return (first[:, None] + torch.arange(num_kv_heads) * page_size).view(-1)


def qk_norm_rope_write_reference(
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
    """Token by token, head by head; rotation in fp32. Does not change `qkv`, writes the pages."""
    _, num_kv_heads, page_size, head_dim = k_pages.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_q_heads = heads.shape[1] - 2 * num_kv_heads
    half = cos_sin.shape[1] // 2
    out = torch.empty(qkv.shape[0], num_q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    for t in range(qkv.shape[0]):
        position = t if positions is None else int(positions[t])
        cos, sin = cos_sin[position, :half], cos_sin[position, half:]
        slot = int(slot_mapping[t])
        for h in range(num_q_heads + num_kv_heads):
            x = heads[t, h]
            weight = q_weight if h < num_q_heads else k_weight
            if weight is not None:
                x = norm_reference(x, NormWeights(weight, eps))
            first, second = x[:half].float(), x[half : 2 * half].float()
            turned = torch.cat((first * cos - second * sin, second * cos + first * sin, x[2 * half :].float()))
            if h < num_q_heads:
                out[t, h] = turned.to(qkv.dtype)
            elif slot >= 0:
                k_pages[slot // page_size, h - num_q_heads, slot % page_size] = turned.to(qkv.dtype)
        if slot >= 0:
            v_pages[slot // page_size, :, slot % page_size] = heads[t, num_q_heads + num_kv_heads :]
    return out


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
