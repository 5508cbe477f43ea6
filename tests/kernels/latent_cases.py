"""Random problems of latent attention, shared by the CPU's and the interpreter's tests."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


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
