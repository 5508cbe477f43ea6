"""Attention over pages that keep one latent and one rotated key for all heads (DeepSeek-V2, 2024).

A position keeps [latent | rotated key]. There are two ways to attend, with the same result:

    absorbed    queries are projected to the latent space: every head reads the same pages as they are
    expanded    latents are expanded to each head's keys and values: less work for a pair, more for a position
"""

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.attention.paged_attention_cpu import (
    CpuAttentionPlan,
    attend,
    gather_group,
    gather_row,
    merge,
    plan_cpu_attention,
)
from penstock.kernels.latents.choice import Choice

SCORES = 1 << 24  # scores that the CPU path holds at once


def expanding_pays(num_queries: int, seq_len: int, kv_rank: int, rope_dim: int, nope_dim: int, v_dim: int) -> bool:
    """Whether the expanded way needs fewer multiplications than the absorbed one, for a row's new tokens.

    For each head, a visible pair of positions costs the products for a score and a value, either in the latent space or
    in the head's own. In addition, the absorbed way projects every query to the latent space and back, and the expanded
    way expands every position of the context. A single query is always absorbed, because captured graphs of decode
    steps cannot choose.

    Args:
        num_queries: new tokens of the row.
        seq_len: its context with them.
        kv_rank: numbers of a latent.
        rope_dim: numbers of the rotated key.
        nope_dim: numbers of a head's key that are not rotated.
        v_dim: numbers of a head's value.
    """
    num_pairs = num_queries * (seq_len - num_queries) + num_queries * (num_queries + 1) // 2
    way = kv_rank * (nope_dim + v_dim)
    absorbed = num_pairs * (2 * kv_rank + rope_dim) + num_queries * way
    expanded = num_pairs * (nope_dim + rope_dim + v_dim) + seq_len * way
    return num_queries > 1 and expanded < absorbed


def latent_attention(
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
) -> Tensor:
    """Attend the absorbed way, from each row's new tokens to its whole context, which is already in the pages.

    Query i of batch row b sits at position `seq_lens[b] - query_len[b] + i` and sees positions up to its own.

    Args:
        q: [T, Hq, kv_rank + rope_dim]: absorbed queries, then their rotated parts.
        pages: [num_pages, 1, page_size, W]; an entry begins with kv_rank + rope_dim numbers of the latent and the key.
        page_table: int32 [N, max_pages], one row per batch row.
        query_start_loc: int32 [N + 1].
        seq_lens: int32 [N], context length with this step's tokens.
        kv_rank: numbers of a latent, which are both key and value.
        scale: multiplies the dot products.
        max_query_len: largest query length of the batch.
        max_seq_len: largest of `seq_lens` (an upper bound is fine).

    Returns:
        [T, Hq, kv_rank], weighted means of latents.
    """
    if q.ndim != 3 or pages.ndim != 4 or pages.shape[1] != 1 or q.shape[2] > pages.shape[3]:
        raise ValueError(f"q {tuple(q.shape)} does not fit pages {tuple(pages.shape)}")
    if not 0 < kv_rank < q.shape[2]:
        raise ValueError(f"a latent of {kv_rank} does not fit keys of {q.shape[2]}")
    if query_start_loc.shape[0] != seq_lens.shape[0] + 1:
        raise ValueError(f"query_start_loc {tuple(query_start_loc.shape)} does not fit {seq_lens.shape[0]} rows")
    if q.is_cuda:
        from penstock.kernels.triton.latents.attention import latent_attention_triton

        return latent_attention_triton(
            q,
            pages,
            page_table,
            query_start_loc,
            seq_lens,
            kv_rank=kv_rank,
            scale=scale,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
    plan = plan_cpu_attention(query_start_loc.tolist(), seq_lens.tolist(), page_table, pages.shape[2], 1)
    return latent_attention_cpu(q, pages, plan, kv_rank, scale)


def latent_attention_cpu(q: Tensor, pages: Tensor, plan: CpuAttentionPlan, kv_rank: int, scale: float) -> Tensor:
    """Arguments and result as in `latent_attention`. Contexts are gathered, and multiplied as matrices."""
    num_heads = q.shape[1]
    out = torch.empty((*q.shape[:2], kv_rank), dtype=q.dtype)
    for group in plan.decode_groups(None):
        rows = q if group.tokens is None else q.index_select(0, group.tokens)
        mask = None if group.mask is None else group.mask[:, 0]
        result = _absorbed(rows, gather_group(pages, group)[:, 0, :, : q.shape[2]], mask, kv_rank, scale)
        if group.tokens is None:
            out = result
        else:
            out.index_copy_(0, group.tokens, result)
    for row in plan.prefills:
        context = gather_row(pages, row.pages, 0, row.seq_len)[0, ..., : q.shape[2]]
        count = max(1, SCORES // (num_heads * row.seq_len))
        for i in range(0, row.query_len, count):
            num = min(count, row.query_len - i)
            end = row.seq_len - row.query_len + i + num
            tokens = slice(row.first_token + i, row.first_token + i + num)
            mask = torch.zeros(num, 1, end)
            mask[:, 0, end - num :].fill_(-torch.inf).triu_(1)
            queries = q[tokens].reshape(1, num * num_heads, -1)
            repeated = mask.expand(num, num_heads, end).reshape(1, num * num_heads, end)
            out[tokens] = _absorbed(queries, context[:, :end], repeated, kv_rank, scale).view(num, num_heads, -1)
    return out


def chosen_latent_attention(q: Tensor, pages: Tensor, choice: Choice, *, kv_rank: int, scale: float) -> Tensor:
    """Attend the absorbed way, from each token to the positions that were chosen for it.

    Args:
        q: [T, Hq, kv_rank + rope_dim]: absorbed queries, then their rotated parts.
        pages: as in `latent_attention`.
        choice: of these tokens, none of which chose nothing.
        kv_rank: numbers of a latent, which are both key and value.
        scale: multiplies the dot products.

    Returns:
        [T, Hq, kv_rank], weighted means of latents.
    """
    (num_tokens, num_heads, dim), top_k = q.shape, choice.slots.shape[1]
    entries = pages.view(-1, pages.shape[3])
    if q.is_cuda:  # each token is a row of its own, and each of its positions a page
        starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=q.device)
        return latent_attention(
            q,
            entries[:, None, None],
            choice.slots,
            starts,
            choice.counts,
            kv_rank=kv_rank,
            scale=scale,
            max_query_len=1,
            max_seq_len=top_k,
        )
    out = torch.empty((num_tokens, num_heads, kv_rank), dtype=q.dtype)
    count = max(1, SCORES // (top_k * max(num_heads, dim)))
    for first in range(0, num_tokens, count):
        tokens = slice(first, first + count)
        context = entries[choice.slots[tokens].long(), :dim]
        hidden = torch.arange(top_k) >= choice.counts[tokens, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None]
        out[tokens] = _absorbed(q[tokens], context, mask, kv_rank, scale)
    return out


def _absorbed(q: Tensor, context: Tensor, mask: Tensor | None, kv_rank: int, scale: float) -> Tensor:
    """q [B, M, D], context [B, S, D], mask fp32 [B, 1 or M, S] of 0 and -inf -> [B, M, kv_rank]."""
    scores = torch.bmm(q, context.transpose(1, 2)).float().mul_(scale)
    if mask is not None:
        scores.add_(mask)
    return torch.bmm(scores.softmax(-1).to(q.dtype), context[..., :kv_rank])


def expanded_attention(
    q: Tensor,
    kv: Tensor,
    rotated: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    scale: float,
    max_query_len: int,
    out: Tensor,
) -> None:
    """Attend the expanded way: causal attention of a ragged batch over keys and values of all contexts in sequence.

    Query i of batch row b sits at position `num_keys[b] - query_len[b] + i` and sees positions up to its own.

    Args:
        q: [T, h, nope_dim + rope_dim], some of the heads.
        kv: [S, h, nope_dim + v_dim]: of each position and head the key without its rotated part, and the value.
        rotated: [S, rope_dim], the rotated part of the keys of all heads.
        query_start_loc: int32 [N + 1], where each row's tokens begin in `q`.
        key_start_loc: int32 [N + 1], where its context, with these tokens, begins in `kv`.
        scale: multiplies the dot products.
        max_query_len: largest query length of the batch.
        out: [T, h, v_dim] to write to.
    """
    nope_dim = q.shape[2] - rotated.shape[1]
    if q.ndim != 3 or kv.ndim != 3 or not 0 < nope_dim < kv.shape[2] or kv.shape[1] != q.shape[1]:
        raise ValueError(f"q {tuple(q.shape)} does not fit keys {tuple(kv.shape)} and {tuple(rotated.shape)}")
    if out.shape != (*q.shape[:2], kv.shape[2] - nope_dim) or rotated.shape[0] != kv.shape[0]:
        raise ValueError(f"out {tuple(out.shape)} does not fit q {tuple(q.shape)} and values of {tuple(kv.shape)}")
    if query_start_loc.shape != key_start_loc.shape:
        raise ValueError(f"{tuple(query_start_loc.shape)} and {tuple(key_start_loc.shape)} are different rows")
    if q.is_cuda:
        from penstock.kernels.triton.latents.expanded import expanded_attention_triton

        expanded_attention_triton(
            q, kv, rotated, query_start_loc, key_start_loc, scale=scale, max_query_len=max_query_len, out=out
        )
        return
    # torch's fused attention requires keys and values of the same head size.
    dim = max(q.shape[2], out.shape[2])
    v_dim = out.shape[2]
    k = torch.cat((kv[..., :nope_dim], rotated[:, None].expand(-1, kv.shape[1], -1)), dim=2)
    queries, keys, values = (
        functional.pad(part, (0, dim - part.shape[2])).transpose(0, 1)[None] for part in (q, k, kv[..., nope_dim:])
    )
    starts, key_starts = query_start_loc.tolist(), key_start_loc.tolist()
    for b, (first, last) in enumerate(pairwise(starts)):
        if first == last:
            continue
        begin, end = key_starts[b], key_starts[b + 1]
        new = end - (last - first)
        its = queries[:, :, first:last]
        result, lse = attend(its, keys[:, :, new:end], values[:, :, new:end], None, True, scale, 0.0)
        if new > begin:
            before = attend(its, keys[:, :, begin:new], values[:, :, begin:new], None, False, scale, 0.0)
            result, _ = merge(result, lse, *before)
        out[first:last] = result[0, ..., :v_dim].transpose(0, 1)


def latent_attention_reference(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    kv_rank: int,
    scale: float,
) -> Tensor:
    """Query by query in float64, rounded once; arguments as in `latent_attention`."""
    page_size = pages.shape[2]
    out = torch.empty((*q.shape[:2], kv_rank), dtype=q.dtype, device=q.device)
    starts = query_start_loc.tolist()
    for b, seq_len in enumerate(seq_lens.tolist()):
        query_len = starts[b + 1] - starts[b]
        its = page_table[b, : math.ceil(seq_len / page_size)].long()
        context = pages[its, 0].flatten(0, 1)[:seq_len, : q.shape[2]].double()
        for i in range(query_len):
            seen = context[: seq_len - query_len + i + 1]
            token = starts[b] + i
            weights = (q[token].double() @ seen.T * scale).softmax(-1)
            out[token] = (weights @ seen[:, :kv_rank]).to(q.dtype)
    return out


def expanded_attention_reference(
    q: Tensor,
    kv: Tensor,
    rotated: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Query by query in float64, rounded once: what `expanded_attention` writes."""
    nope_dim = q.shape[2] - rotated.shape[1]
    out = torch.empty((*q.shape[:2], kv.shape[2] - nope_dim), dtype=q.dtype, device=q.device)
    starts, key_starts = query_start_loc.tolist(), key_start_loc.tolist()
    for b, (first, last) in enumerate(pairwise(starts)):
        for token in range(first, last):
            seen = slice(key_starts[b], key_starts[b + 1] - (last - token) + 1)
            its = q[token].double()
            scores = torch.einsum("hd,shd->hs", its[:, :nope_dim], kv[seen, :, :nope_dim].double())
            scores += its[:, nope_dim:] @ rotated[seen].double().T
            values = kv[seen, :, nope_dim:].double()
            out[token] = torch.einsum("hs,shd->hd", (scores * scale).softmax(-1), values).to(q.dtype)
    return out
