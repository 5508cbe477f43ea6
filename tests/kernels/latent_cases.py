"""Random problems of latent attention, shared by the CPU's and the interpreter's tests."""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.latents.choice import Choice


class LatentInputs(NamedTuple):
    """As `latent_attention` takes them, in its order."""

    q: Tensor
    pages: Tensor
    page_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor


class ExpandedInputs(NamedTuple):
    """As `expanded_attention` takes them, in its order."""

    q: Tensor
    kv: Tensor
    rotated: Tensor
    query_start_loc: Tensor
    key_start_loc: Tensor


Lens = tuple[tuple[int, int], ...]
"""(query length, context length with the query) per row."""


class IndexInputs(NamedTuple):
    """As `choose` takes them, in its order."""

    q: Tensor
    weights: Tensor
    pages: Tensor
    page_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor


def index_inputs(
    lens: Lens, num_heads: int, dim: int, before: int, page_size: int, dtype: torch.dtype, device: str = "cpu"
) -> IndexInputs:
    """Index keys behind `before` other numbers of each entry, in the pages of `latent_inputs`."""
    of_latents = latent_inputs(lens, 1, before, dim, page_size, dtype, device, torch.nan)
    num_tokens = of_latents.q.shape[0]
    return IndexInputs(
        torch.randn(num_tokens, num_heads, dim).to(dtype).to(device),
        torch.randn(num_tokens, num_heads).to(device),
        *of_latents[1:],
    )


def positions_of(choice: Choice, inputs: IndexInputs) -> list[set[int]]:
    """The chosen positions of each token."""
    page_size, found = inputs.pages.shape[2], list[set[int]]()
    for row, (first, last) in enumerate(pairwise(inputs.query_start_loc.tolist())):
        count = -(-int(inputs.seq_lens[row]) // page_size)
        pages = {page: i for i, page in enumerate(inputs.page_table[row, :count].tolist())}
        for token in range(first, last):
            slots = choice.slots[token, : int(choice.counts[token])].tolist()
            assert len(set(slots)) == len(slots)
            found.append({pages[slot // page_size] * page_size + slot % page_size for slot in slots})
    return found


def chosen_inputs(
    num_tokens: int, top_k: int, num_heads: int, kv_rank: int, rope_dim: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Choice]:
    """Queries, pages of one position, and 1 to `top_k` positions for each token."""
    slots = torch.randperm(num_tokens * top_k, device=device, dtype=torch.int32).view(num_tokens, top_k)
    counts = 1 + torch.arange(num_tokens, device=device, dtype=torch.int32) % top_k
    pages = torch.randn(num_tokens * top_k, 1, 1, kv_rank + rope_dim + 12, device=device)
    q = torch.randn(num_tokens, num_heads, kv_rank + rope_dim, device=device)
    return q.to(dtype), pages.to(dtype), Choice(slots, counts)


def chosen_reference(q: Tensor, pages: Tensor, choice: Choice, kv_rank: int, scale: float) -> Tensor:
    """Token by token in float64, rounded once."""
    out = torch.empty((*q.shape[:2], kv_rank), dtype=q.dtype, device=q.device)
    for token, count in enumerate(choice.counts.tolist()):
        context = pages.flatten(0, 2)[choice.slots[token, :count].long(), : q.shape[2]].double()
        weights = (q[token].double() @ context.T * scale).softmax(-1)
        out[token] = (weights @ context[:, :kv_rank]).to(q.dtype)
    return out


def latent_inputs(
    lens: Lens,
    num_heads: int,
    kv_rank: int,
    rope_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
    unowned: float = 99.0,
) -> LatentInputs:
    """Pages in random order; slots that no row owns, and unused page ids, would spoil the result."""
    counts = [-(-seq_len // page_size) for _, seq_len in lens]
    pool = torch.full((2, 1, sum(counts) + 3, 1, page_size, kv_rank + rope_dim), unowned)
    order = torch.randperm(sum(counts) + 3).int()
    table = torch.full((len(lens), max(counts) + 2), 10**6, dtype=torch.int32)
    for b, ids in enumerate(torch.split(order, [*counts, 3])[:-1]):
        table[b, : counts[b]] = ids
        for i, page in enumerate(ids.tolist()):
            filled = min(page_size, lens[b][1] - i * page_size)
            pool[1, 0, page, 0, :filled] = torch.randn(filled, kv_rank + rope_dim)
    q = torch.randn(sum(query_len for query_len, _ in lens), num_heads, kv_rank + rope_dim)
    return LatentInputs(
        q.to(dtype).to(device),
        pool.to(dtype).to(device)[1, 0],
        table.to(device),
        starts_of([query_len for query_len, _ in lens]).to(device),
        torch.tensor([seq_len for _, seq_len in lens], dtype=torch.int32, device=device),
    )


def expanded_inputs(
    lens: Lens, num_heads: int, nope_dim: int, rope_dim: int, v_dim: int, dtype: torch.dtype, device: str = "cpu"
) -> ExpandedInputs:
    """Keys and values as a product leaves them."""
    query_starts = starts_of([query_len for query_len, _ in lens])
    key_starts = starts_of([seq_len for _, seq_len in lens])
    num_queries, num_keys = int(query_starts[-1]), int(key_starts[-1])
    q = torch.randn(num_queries, num_heads, nope_dim + rope_dim)
    kv = torch.randn(num_keys, num_heads, nope_dim + v_dim)
    rotated = torch.randn(num_keys, 7 + rope_dim)[:, 7:]
    q, kv, rotated = (part.to(dtype).to(device) for part in (q, kv, rotated))
    return ExpandedInputs(q, kv, rotated, query_starts.to(device), key_starts.to(device))


def starts_of(lens: list[int]) -> Tensor:
    """int32 [N + 1]"""
    return torch.tensor([0, *lens]).cumsum(0).int()


def bounds_of(lens: Lens) -> dict[str, Any]:
    """The largest lengths, as the kernels take them."""
    return {"max_query_len": max(query for query, _ in lens), "max_seq_len": max(keys for _, keys in lens)}
