"""RMSNorm of a latent, rotary embedding beside it, and the write of both into their page, as one operation."""

import torch
from torch import Tensor

from penstock.kernels.attention.qk_norm_rope_write import rotate, slot_cells
from penstock.kernels.norms import NormWeights, norm_cpu, norm_reference


def latent_write(
    kv: Tensor,
    q: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    weight: Tensor,
    eps: float,
    pages: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Norm the latents, rotate keys and queries (the half-split layout), store latents and keys.

    Args:
        kv: [T, kv_rank + rope_dim]: latents, then keys.
        q: [T, Hq, nope_dim + rope_dim]; the last rope_dim numbers of each head are rotated, in place.
        positions: [T] int32 or int64, the row of `cos_sin` for each token; None if `cos_sin` has a row per token.
        cos_sin: [max_pos or T, rope_dim] fp32, cosines in the first half of a row, sines in the second; None: no turns.
        weight: [kv_rank], of the norm.
        eps: of the norm.
        pages: [num_pages, 1, page_size, W]; the first kv_rank + rope_dim numbers of an entry are written.
        slot_mapping: [T] int32 or int64; a negative slot writes nothing.
    """
    rope_dim = kv.shape[1] - weight.shape[0] if cos_sin is None else cos_sin.shape[1]
    if kv.ndim != 2 or pages.shape[1] != 1 or pages.shape[3] < kv.shape[1]:
        raise ValueError(f"kv {tuple(kv.shape)} does not fit pages {tuple(pages.shape)}")
    if weight.shape[0] + rope_dim != kv.shape[1] or q.ndim != 3 or q.shape[2] < rope_dim or rope_dim % 2:
        raise ValueError(f"kv {tuple(kv.shape)}, q {tuple(q.shape)} do not fit {weight.shape[0]} and {rope_dim}")
    if q.shape[0] != kv.shape[0] or slot_mapping.shape[0] != kv.shape[0]:
        raise ValueError(f"{kv.shape[0]}, {q.shape[0]} and {slot_mapping.shape[0]} are not the same tokens")
    if positions is None and cos_sin is not None and cos_sin.shape[0] != kv.shape[0]:
        raise ValueError(f"without positions, cos_sin needs one row per token, got {tuple(cos_sin.shape)}")
    if kv.is_cuda:
        from penstock.kernels.triton.latents.write import latent_write_triton

        latent_write_triton(kv, q, positions, cos_sin, weight, eps, pages, slot_mapping)
        return
    kept = slot_mapping >= 0
    latent_write_cpu(
        kv, q, positions, cos_sin, weight, eps, pages, slot_cells(slot_mapping[kept], 1, pages.shape[2]), kept
    )


def latent_write_cpu(
    kv: Tensor,
    q: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    weight: Tensor,
    eps: float,
    pages: Tensor,
    cells: Tensor,
    kept: Tensor | None = None,
) -> None:
    """Like `latent_write`, with the result of `slot_cells`; `kept` says which tokens have a slot."""
    kv_rank = weight.shape[0]
    key = kv[:, kv_rank:]
    if cos_sin is not None:
        rows = cos_sin if positions is None else cos_sin.index_select(0, positions)
        rope_dim = rows.shape[1]
        q[..., -rope_dim:] = rotate(q[..., -rope_dim:], rows)
        key = rotate(key[:, None], rows)[:, 0]
    entries = torch.cat((norm_cpu(kv[:, :kv_rank], NormWeights(weight, eps)), key), dim=1)
    pages.view(-1, pages.shape[3])[:, : kv.shape[1]].index_copy_(0, cells, entries if kept is None else entries[kept])


def latent_write_reference(
    kv: Tensor,
    q: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    weight: Tensor,
    eps: float,
    pages: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Token by token; rotation in fp32."""
    kv_rank, page_size = weight.shape[0], pages.shape[2]
    half = (kv.shape[1] - kv_rank) // 2

    def turned(x: Tensor) -> Tensor:
        if cos_sin is None:
            return x
        cos, sin = cos_sin[position, :half], cos_sin[position, half:]
        first, second = x[..., :half].float(), x[..., half:].float()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    for t in range(kv.shape[0]):
        position = t if positions is None else int(positions[t])
        q[t, :, -2 * half :] = turned(q[t, :, -2 * half :])
        slot = int(slot_mapping[t])
        if slot >= 0:
            entry = pages[slot // page_size, 0, slot % page_size]
            entry[:kv_rank] = norm_reference(kv[t, :kv_rank], NormWeights(weight, eps))
            entry[kv_rank : kv.shape[1]] = turned(kv[t, kv_rank:])
