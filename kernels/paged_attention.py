"""Causal attention of a ragged batch over paged keys and values."""

import math

import torch
from torch import Tensor

from penstock.kernels.paged_attention_cpu import paged_attention_cpu, plan_cpu_attention


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from each row's new tokens to its whole context, which is already in the pages.

    Query i of batch row b sits at position `seq_lens[b] - query_len[b] + i` and sees positions up to its own.

    Args:
        q: [T, Hq, D].
        k_pages: [num_pages, Hk, page_size, D]; Hq is a multiple of Hk.
        v_pages: the same shape.
        page_table: int32 [N, max_pages], one row per batch row. Ids of pages that no query sees may be anything.
        query_start_loc: int32 [N + 1].
        seq_lens: int32 [N], context length with this step's tokens.
        scale: multiplies the dot products.
        max_query_len: largest query length of the batch.
        max_seq_len: largest of `seq_lens` (an upper bound is fine).
        window: position p sees (p - window, p]; None for all.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        sinks: fp32 [Hq], a logit per head that takes part in the softmax and has no value; None for none.
        out: [T, Hq, D] to write to.

    Returns:
        [T, Hq, D].
    """
    if q.ndim != 3 or k_pages.ndim != 4 or k_pages.shape != v_pages.shape or q.shape[2] != k_pages.shape[3]:
        raise ValueError(f"q {tuple(q.shape)} does not fit pages {tuple(k_pages.shape)}, {tuple(v_pages.shape)}")
    if q.shape[1] % k_pages.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k_pages.shape[1]} key-value heads")
    if query_start_loc.shape[0] != seq_lens.shape[0] + 1:
        raise ValueError(f"query_start_loc {tuple(query_start_loc.shape)} does not fit {seq_lens.shape[0]} rows")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if window is not None and window >= max_seq_len:
        window = None
    if q.is_cuda:
        from penstock.kernels.triton.paged_attention import paged_attention_triton

        return paged_attention_triton(
            q,
            k_pages,
            v_pages,
            page_table,
            query_start_loc,
            seq_lens,
            scale=scale,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            window=window,
            softcap=softcap,
            sinks=sinks,
            out=out,
        )
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    plan = plan_cpu_attention(starts, lens, page_table, k_pages.shape[2], k_pages.shape[1])
    return paged_attention_cpu(q, k_pages, v_pages, plan, scale, window, softcap, sinks, out)


def paged_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Query by query in float64, rounded once; arguments as in `paged_attention`."""
    page_size, group = k_pages.shape[2], q.shape[1] // k_pages.shape[1]
    out = torch.empty_like(q)
    starts = query_start_loc.tolist()
    for b, seq_len in enumerate(seq_lens.tolist()):
        query_len = starts[b + 1] - starts[b]
        if query_len == 0:
            continue
        pages = page_table[b, : math.ceil(seq_len / page_size)].long()
        if window is not None:
            pages[: max(0, seq_len - query_len + 1 - window) // page_size] = pages[-1]  # what is there is not seen
        k = k_pages[pages].transpose(1, 2).flatten(0, 1)[:seq_len].double().repeat_interleave(group, 1)
        v = v_pages[pages].transpose(1, 2).flatten(0, 1)[:seq_len].double().repeat_interleave(group, 1)
        for i in range(query_len):
            position = seq_len - query_len + i
            first = 0 if window is None else max(0, position - window + 1)
            token = starts[b] + i
            scores = torch.einsum("hd,shd->hs", q[token].double(), k[first : position + 1]) * scale
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
            weights = scores.softmax(-1)[:, : position + 1 - first]
            out[token] = torch.einsum("hs,shd->hd", weights, v[first : position + 1]).to(q.dtype)
    return out
