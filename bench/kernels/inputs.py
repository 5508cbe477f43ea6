"""Inputs of the kernel benchmarks, laid out as in a serving process: a sequence's pages are scattered."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.kernels.timing import num_rotations
from penstock.kernels.paged_attention import paged_attention
from penstock.kernels.triton.paged_attention import DecodeTiles, PrefillTiles, paged_attention_triton


@dataclass(frozen=True)
class AttentionProblem:
    """`batch` rows of `query_len` new tokens at the end of `context` tokens; Llama-3.1-8B's heads by default."""

    batch: int
    query_len: int
    context: int
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the batch must read."""
        return self.batch * self.context * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Of the two products over the visible (causal) part."""
        visible = self.query_len * (self.context - self.query_len) + self.query_len * (self.query_len + 1) // 2
        return 4 * self.batch * self.num_q_heads * self.head_dim * visible

    @property
    def rotations(self) -> int:
        """Decode must not find its KV in the L2 cache; prefill does arithmetic, and needs no more than a few."""
        if self.device == "cpu":
            return 1
        return num_rotations(self.kv_bytes) if self.query_len == 1 else 2


@functools.lru_cache(maxsize=2)
def attention_inputs(problem: AttentionProblem, rotations: int) -> tuple[Tensor, ...]:
    """(q [rotations, T, Hq, D], kv [rotations, 2, pages, Hk, page_size, D], page table, query starts, lengths)."""
    generator = torch.Generator(device=problem.device).manual_seed(0)
    per_row = -(-problem.context // problem.page_size)
    num_pages = problem.batch * per_row
    shape = (rotations, 2, num_pages, problem.num_kv_heads, problem.page_size, problem.head_dim)
    kv = torch.empty(shape, dtype=problem.dtype, device=problem.device).normal_(generator=generator)
    tokens = problem.batch * problem.query_len
    q = torch.randn(
        rotations, tokens, problem.num_q_heads, problem.head_dim, device=problem.device, generator=generator
    ).to(problem.dtype)
    order = torch.randperm(num_pages, device=problem.device, generator=generator).to(torch.int32)
    table = order.view(problem.batch, per_row)
    starts = torch.arange(0, tokens + 1, problem.query_len, dtype=torch.int32, device=problem.device)
    lens = torch.full((problem.batch,), problem.context, dtype=torch.int32, device=problem.device)
    return q, kv, table, starts, lens


def attention_calls(
    problem: AttentionProblem, rotations: int, tiles: DecodeTiles | PrefillTiles | None = None
) -> list[Callable[[], Tensor]]:
    """One call per rotation, each on its own layer of the pool."""
    q, kv, table, starts, lens = attention_inputs(problem, rotations)
    if problem.device == "cpu":  # the dry form
        return [
            functools.partial(
                paged_attention, q[i], kv[i, 0], kv[i, 1], table, starts, lens,
                scale=problem.head_dim**-0.5, max_query_len=problem.query_len, max_seq_len=problem.context,
            )
            for i in range(rotations)
        ]  # fmt: skip
    return [
        functools.partial(
            paged_attention_triton, q[i], kv[i, 0], kv[i, 1], table, starts, lens,
            scale=problem.head_dim**-0.5, max_query_len=problem.query_len, max_seq_len=problem.context,
            decode=tiles if isinstance(tiles, DecodeTiles) else None,
            prefill=tiles if isinstance(tiles, PrefillTiles) else None,
        )
        for i in range(rotations)
    ]  # fmt: skip
