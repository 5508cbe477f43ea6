"""Inputs of the kernel benchmarks, laid out as in a serving process: a sequence's pages are scattered."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.kernels.timing import num_rotations
from penstock.kernels.attention.kv_quantization import KV_FORMATS, PageLayout
from penstock.kernels.attention.paged_attention import paged_attention
from penstock.kernels.triton.attention.paged_attention import DecodeTiles, PrefillTiles, paged_attention_triton


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
    kv: str = ""  # the format of quantized pages; else they have the dtype

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the batch must read."""
        layout = self.layout
        of_head = self.head_dim * self.dtype.itemsize if layout is None else layout.format.head_bytes(self.head_dim)
        return self.batch * self.context * 2 * self.num_kv_heads * of_head

    @property
    def layout(self) -> PageLayout | None:
        """Of quantized pages."""
        return PageLayout(KV_FORMATS[self.kv], self.page_size, self.head_dim) if self.kv else None

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
    """(q [rotations, T, Hq, D], kv [rotations, 2, pages, Hk, page_size, D], page table, query starts, lengths).

    Quantized kv is uint8[rotations, 2, pages, Hk, head bytes].
    """
    generator = torch.Generator(device=problem.device).manual_seed(0)
    per_row = -(-problem.context // problem.page_size)
    num_pages = problem.batch * per_row
    kv = _random_pages((rotations, 2, num_pages, problem.num_kv_heads), problem, generator)
    tokens = problem.batch * problem.query_len
    q = torch.randn(
        rotations, tokens, problem.num_q_heads, problem.head_dim, device=problem.device, generator=generator
    ).to(problem.dtype)
    order = torch.randperm(num_pages, device=problem.device, generator=generator).to(torch.int32)
    table = order.view(problem.batch, per_row)
    starts = torch.arange(0, tokens + 1, problem.query_len, dtype=torch.int32, device=problem.device)
    lens = torch.full((problem.batch,), problem.context, dtype=torch.int32, device=problem.device)
    return q, kv, table, starts, lens


def _random_pages(shape: tuple[int, ...], problem: AttentionProblem, generator: torch.Generator) -> Tensor:
    layout = problem.layout
    if layout is None:
        shape = (*shape, problem.page_size, problem.head_dim)
        return torch.empty(shape, dtype=problem.dtype, device=problem.device).normal_(generator=generator)
    pages = torch.empty((*shape, layout.used_bytes), dtype=torch.uint8, device=problem.device)
    pages.random_(0, 120, generator=generator)  # codes of numbers, whatever the format
    layout.scales(pages).fill_(0.01)
    return pages


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
                layout=problem.layout,
            )
            for i in range(rotations)
        ]  # fmt: skip
    return [
        functools.partial(
            paged_attention_triton, q[i], kv[i, 0], kv[i, 1], table, starts, lens,
            scale=problem.head_dim**-0.5, max_query_len=problem.query_len, max_seq_len=problem.context,
            layout=problem.layout,
            decode=tiles if isinstance(tiles, DecodeTiles) else None,
            prefill=tiles if isinstance(tiles, PrefillTiles) else None,
        )
        for i in range(rotations)
    ]  # fmt: skip
