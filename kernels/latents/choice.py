"""Which positions a token attends to: those that an indexer scores highest (DeepSeek-V3.2, 2025).

    score(t, s) = sum over heads h of weight[t, h] * max(0, q[t, h] . k[s])

A chosen position is given as its slot, the place in the pages: page * page_size + offset.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

SCORES = 1 << 24  # scores that the CPU path holds at once
MOST_SCORES = 1 << 26  # and a GPU


class Choice(NamedTuple):
    """What tokens attend to. The first `counts[t]` of a token's slots are distinct positions up to its own."""

    slots: Tensor  # int32[T, top_k]
    counts: Tensor  # int32[T]


def choose(
    q: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    top_k: int,
    max_seq_len: int,
) -> Choice:
    """Choose `top_k` positions for each new token, or all that it sees, if they are no more.

    Query i of batch row b sits at position `seq_lens[b] - query_len[b] + i` and sees positions up to its own.

    Args:
        q: [T, Hi, Di], index queries.
        weights: fp32 [T, Hi], of the heads.
        pages: [num_pages, 1, page_size, W]; the last Di numbers of an entry are the index key.
        page_table: int32 [N, max_pages], one row per batch row.
        query_start_loc: int32 [N + 1].
        seq_lens: int32 [N], context length with this step's tokens.
        top_k: positions.
        max_seq_len: largest of `seq_lens` (an upper bound is fine).
    """
    if q.ndim != 3 or weights.shape != q.shape[:2] or pages.ndim != 4 or pages.shape[1] != 1:
        raise ValueError(f"q {tuple(q.shape)} does not fit weights {tuple(weights.shape)}, pages {tuple(pages.shape)}")
    if q.shape[2] > pages.shape[3]:
        raise ValueError(f"index keys of {q.shape[2]} do not fit entries of {pages.shape[3]}")
    if query_start_loc.shape[0] != seq_lens.shape[0] + 1:
        raise ValueError(f"query_start_loc {tuple(query_start_loc.shape)} does not fit {seq_lens.shape[0]} rows")
    if q.is_cuda:
        from penstock.kernels.triton.latents.choice import choose_triton

        return choose_triton(
            q, weights, pages, page_table, query_start_loc, seq_lens, top_k=top_k, max_seq_len=max_seq_len
        )
    return choose_cpu(q, weights, pages, page_table, query_start_loc, seq_lens, top_k=top_k)


def choose_cpu(
    q: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    top_k: int,
) -> Choice:
    """Like `choose`, row by row."""
    (num_tokens, num_heads, dim), page_size = q.shape, pages.shape[2]
    slots = torch.zeros(num_tokens, top_k, dtype=torch.int32)
    counts = torch.zeros(num_tokens, dtype=torch.int32)
    starts = query_start_loc.tolist()
    for (first, last), seq_len, row in zip(pairwise(starts), seq_lens.tolist(), page_table, strict=True):
        if first == last:
            continue
        its = row[: math.ceil(seq_len / page_size)].long()
        places = (its[:, None] * page_size + torch.arange(page_size)).flatten()[:seq_len].int()
        keys = pages[its, 0].flatten(0, 1)[:seq_len, -dim:].float()
        count = max(1, SCORES // (num_heads * seq_len))
        for begin in range(first, last, count):
            tokens = slice(begin, min(begin + count, last))
            seen = torch.arange(seq_len - (last - begin), seq_len - (last - tokens.stop))
            scores = torch.relu(q[tokens].float() @ keys.T)
            scores = torch.bmm(weights[tokens, None].float(), scores)[:, 0]
            scores.masked_fill_(torch.arange(seq_len) > seen[:, None], -torch.inf)
            num = min(top_k, seq_len)
            slots[tokens, :num] = places[scores.topk(num).indices]
            counts[tokens] = (seen + 1).clamp(max=top_k).int()
    return Choice(slots, counts)


def keep_index_keys(k: Tensor, pages: Tensor, slot_mapping: Tensor) -> None:
    """Store index keys [T, Di] as the last numbers of the entries at `slot_mapping` [T]; a negative one keeps nothing.

    `pages` is [num_pages, 1, page_size, W].
    """
    if k.is_cuda:
        from penstock.kernels.triton.latents.choice import keep_index_keys_triton

        keep_index_keys_triton(k, pages, slot_mapping)
        return
    kept = slot_mapping >= 0
    pages.view(-1, pages.shape[3])[:, -k.shape[1] :].index_copy_(0, slot_mapping[kept].long(), k[kept].to(pages.dtype))


def choose_reference(
    q: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    top_k: int,
) -> list[set[int]]:
    """The chosen positions of each token, by scores in float64; arguments as in `choose`."""
    page_size, found = pages.shape[2], list[set[int]]()
    for b, (first, last) in enumerate(pairwise(query_start_loc.tolist())):
        seq_len = int(seq_lens[b])
        keys = pages[page_table[b, : math.ceil(seq_len / page_size)].long(), 0].flatten(0, 1)
        for token in range(first, last):
            seen = keys[: seq_len - (last - token) + 1, -q.shape[2] :].double()
            scores = (torch.relu(q[token].double() @ seen.T) * weights[token].double()[:, None]).sum(0)
            found.append(set(scores.topk(min(top_k, len(seen))).indices.tolist()))
    return found
