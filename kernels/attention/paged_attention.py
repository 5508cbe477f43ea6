"""Causal attention of a ragged batch over paged keys and values."""

import torch
from torch import Tensor

from penstock.kernels.attention.kv_quantization import PageLayout, read_quantized
from penstock.kernels.attention.paged_attention_cpu import first_seen, paged_attention_cpu, plan_cpu_attention


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
    layout: PageLayout | None = None,
    paths: Tensor | None = None,
    last_seen: Tensor | None = None,
) -> Tensor:
    """Attend from each row's new tokens to its whole context, which is already in the pages.

    Query i of batch row b sits at position `seq_lens[b] - query_len[b] + i` and sees positions up to its own.

    Args:
        q: [T, Hq, D].
        k_pages: [num_pages, Hk, page_size, D]; Hq is a multiple of Hk. With a layout uint8[num_pages, Hk, head bytes].
        v_pages: the same shape and strides.
        page_table: int32 [N, max_pages], one row per batch row. Entries for pages that no query sees are arbitrary.
        query_start_loc: int32 [N + 1].
        seq_lens: int32 [N], context length with this step's tokens.
        scale: multiplies the dot products; positive.
        max_query_len: largest query length of the batch.
        max_seq_len: largest of `seq_lens` (an upper bound is fine).
        window: position p sees the positions in (p - window, p]; None for all. If negative, positions are divided into
            chunks of -window, the first beginning at 0, and p sees those of its own chunk.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        sinks: fp32 [Hq], a logit per head that takes part in the softmax but has no value; None for none.
        out: [T, Hq, D] to write to.
        layout: of quantized pages.
        paths: int32 [N, 1 + D], for the nodes of trees of drafts; None if there are none. A node's row begins with the
            position f at which its tree begins. Then come the places of the keys and values of positions f, f + 1, ...
            up to the node's own position. Place p is where a row without a tree has position p. A row that is no node
            begins with `NO_PATH`. Nodes have one query each. Keys are taken in the order of positions, so the result
            is that of a sequence with the tokens of the node's path.
        last_seen: int32 [T], the last position that each query sees, its own or a later one of this step; None: its
            own. On GPUs only; a CPU has `attend_whole`.

    Returns:
        [T, Hq, D].
    """
    head_dim, num_axes = (layout.head_dim, 3) if layout is not None else (k_pages.shape[-1], 4)
    if q.ndim != 3 or k_pages.ndim != num_axes or k_pages.shape != v_pages.shape or q.shape[2] != head_dim:
        raise ValueError(f"q {tuple(q.shape)} does not fit pages {tuple(k_pages.shape)}, {tuple(v_pages.shape)}")
    if k_pages.stride() != v_pages.stride():
        raise ValueError(f"pages of keys and values have strides {k_pages.stride()} and {v_pages.stride()}")
    if q.shape[1] % k_pages.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k_pages.shape[1]} key-value heads")
    if query_start_loc.shape[0] != seq_lens.shape[0] + 1:
        raise ValueError(f"query_start_loc {tuple(query_start_loc.shape)} does not fit {seq_lens.shape[0]} rows")
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if window == 0:
        raise ValueError("window must be a number of positions, or None, got 0")
    if window is not None and abs(window) >= max_seq_len:
        window = None
    if q.is_cuda:
        from penstock.kernels.triton.attention.paged_attention import paged_attention_triton

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
            layout=layout,
            paths=paths,
            last_seen=last_seen,
        )
    if last_seen is not None:
        raise ValueError("queries on a CPU see positions behind them by attend_whole alone")
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    page_size = k_pages.shape[2] if layout is None else layout.page_size
    plan = plan_cpu_attention(starts, lens, page_table, page_size, k_pages.shape[1], paths)
    return paged_attention_cpu(q, k_pages, v_pages, plan, scale, window, softcap, sinks, out, layout)


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
    layout: PageLayout | None = None,
    paths: Tensor | None = None,
    last_seen: Tensor | None = None,
) -> Tensor:
    """Query by query in float64, rounded once; arguments as in `paged_attention`."""
    if layout is not None:
        k_pages, v_pages = read_quantized(k_pages, layout), read_quantized(v_pages, layout)
    page_size, group = k_pages.shape[2], q.shape[1] // k_pages.shape[1]
    out = torch.empty_like(q)
    starts = query_start_loc.tolist()
    for b, seq_len in enumerate(seq_lens.tolist()):
        query_len = starts[b + 1] - starts[b]
        if query_len == 0:
            continue
        places = torch.arange(seq_len, device=q.device)
        if paths is not None and int(paths[b, 0]) < seq_len:
            first = int(paths[b, 0])
            places[first:] = paths[b, 1 : 1 + seq_len - first]
        pages = page_table[b, : int(places.max()) // page_size + 1].long()
        if window is not None:
            pages[: first_seen(seq_len - query_len, window) // page_size] = pages[-1]  # these are not seen
        k = k_pages[pages].transpose(1, 2).flatten(0, 1)[places].double().repeat_interleave(group, 1)
        v = v_pages[pages].transpose(1, 2).flatten(0, 1)[places].double().repeat_interleave(group, 1)
        for i in range(query_len):
            position = seq_len - query_len + i
            first = first_seen(position, window)
            token = starts[b] + i
            behind = (position if last_seen is None else int(last_seen[token])) + 1
            scores = torch.einsum("hd,shd->hs", q[token].double(), k[first:behind]) * scale
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
            weights = scores.softmax(-1)[:, : behind - first]
            out[token] = torch.einsum("hs,shd->hd", weights, v[first:behind]).to(q.dtype)
    return out
