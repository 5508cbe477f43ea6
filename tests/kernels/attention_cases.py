"""Random paged attention problems, shared by the interpreter, GPU and compile tests."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.attention.paged_attention_cpu import first_seen


@dataclass(frozen=True)
class AttentionCase:
    """`lens` holds (query length, context length with the query) per row."""

    lens: tuple[tuple[int, int], ...]
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class AttentionInputs:
    """`args` in the order of `paged_attention`, and its keyword arguments."""

    args: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
    options: dict[str, Any]
    max_query_len: int
    max_seq_len: int


def make_inputs(case: AttentionCase, device: str = "cpu", seed: int = 0) -> AttentionInputs:
    """Pages in random order; what no query of a row may read would spoil the result.

    That is every slot that no row owns, and the page ids behind the row's pages and behind its window.
    """
    generator = torch.Generator().manual_seed(seed)
    page, heads, dim = case.page_size, case.num_kv_heads, case.head_dim
    counts = [-(-seq_len // page) for _, seq_len in case.lens]
    num_pages = sum(counts) + 3
    # One allocation sliced as the KV pool is, so that strides matter.
    pool = torch.full((2, 2, num_pages, heads, page, dim), float("nan"))
    order = torch.randperm(num_pages, generator=generator).tolist()
    table = torch.full((len(case.lens), max(counts) + 2), 10**6, dtype=torch.int32)
    used = 0
    for b, (query_len, seq_len) in enumerate(case.lens):
        pages = order[used : used + counts[b]]
        used += counts[b]
        first = first_seen(seq_len - query_len, case.window) // page
        table[b, first : counts[b]] = torch.tensor(pages[first:], dtype=torch.int32)
        for i, page_id in enumerate(pages[first:], first):
            filled = min(page, seq_len - i * page)
            pool[1, :, page_id, :, :filled] = torch.randn(2, heads, filled, dim, generator=generator)
    pool = pool.to(case.dtype).to(device)
    starts = [0]
    for query_len, _ in case.lens:
        starts.append(starts[-1] + query_len)
    q = torch.randn(starts[-1], case.num_q_heads, dim, generator=generator).to(case.dtype).to(device)
    options: dict[str, Any] = {"scale": 1.5 * dim**-0.5, "window": case.window, "softcap": case.softcap}
    options["sinks"] = torch.randn(case.num_q_heads, generator=generator).to(device) if case.sinks else None
    seq_lens = [seq_len for _, seq_len in case.lens]
    return AttentionInputs(
        (
            q,
            pool[1, 0],
            pool[1, 1],
            table.to(device),
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(seq_lens, dtype=torch.int32, device=device),
        ),
        options,
        max(query_len for query_len, _ in case.lens),
        max(seq_lens),
    )
