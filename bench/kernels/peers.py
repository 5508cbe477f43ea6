"""Other libraries' attention on the same problem: torch's SDPA on contiguous K and V, FlashInfer on the same pages."""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from bench.kernels.inputs import AttentionProblem, attention_inputs

Calls = list[Callable[[], object]]
Peer = tuple[str, Callable[[], Calls]]
MOST_PEER_BYTES = 8 << 30  # contiguous copies of larger problems are left out


def decode_peers(problem: AttentionProblem) -> Iterator[Peer]:
    """(name, what makes the calls) of each library that can be used here, for one new token per row."""
    if problem.kv_bytes * problem.rotations <= MOST_PEER_BYTES:
        yield "sdpa", functools.partial(_sdpa, problem, causal=False)
    if problem.device == "cuda" and importlib.util.find_spec("flashinfer"):
        yield "flashinfer", functools.partial(_flashinfer_decode, problem)


def prefill_peers(problem: AttentionProblem) -> Iterator[Peer]:
    """As `decode_peers`, for fresh prompts: SDPA's causal mask is aligned to the first key."""
    if problem.query_len == problem.context:
        yield "sdpa", functools.partial(_sdpa, problem, causal=True)
    if problem.device == "cuda" and importlib.util.find_spec("flashinfer"):
        yield "flashinfer", functools.partial(_flashinfer_prefill, problem)


def contiguous_kv(problem: AttentionProblem, kv: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """kv [2, pages, Hk, page_size, D] -> two [B, Hk, context, D]."""
    k, v = (
        part[table.long()].transpose(1, 2).reshape(problem.batch, problem.num_kv_heads, -1, problem.head_dim)
        for part in kv
    )
    return k[:, :, : problem.context].contiguous(), v[:, :, : problem.context].contiguous()


def _sdpa(problem: AttentionProblem, *, causal: bool) -> Calls:
    q, kv, table, _, _ = attention_inputs(problem, problem.rotations)
    shape = (problem.batch, problem.query_len, problem.num_q_heads, problem.head_dim)
    calls: Calls = []
    for i in range(problem.rotations):
        k, v = contiguous_kv(problem, kv[i], table)
        queries = q[i].view(shape).transpose(1, 2)
        attention = functional.scaled_dot_product_attention
        calls.append(functools.partial(attention, queries, k, v, is_causal=causal, enable_gqa=True))
    return calls


def _flashinfer_decode(problem: AttentionProblem) -> Calls:
    flashinfer = importlib.import_module("flashinfer")
    q, kv, table, _, _ = attention_inputs(problem, problem.rotations)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=problem.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(
        *_page_lists(problem, table), problem.num_q_heads, problem.num_kv_heads, problem.head_dim, problem.page_size,
        q_data_type=problem.dtype, kv_data_type=problem.dtype,
    )  # fmt: skip
    return [functools.partial(wrapper.run, q[i], (kv[i, 0], kv[i, 1])) for i in range(problem.rotations)]


def _flashinfer_prefill(problem: AttentionProblem) -> Calls:
    flashinfer = importlib.import_module("flashinfer")
    q, kv, table, starts, _ = attention_inputs(problem, problem.rotations)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=problem.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
    wrapper.plan(
        starts, *_page_lists(problem, table), problem.num_q_heads, problem.num_kv_heads, problem.head_dim,
        problem.page_size, causal=True, q_data_type=problem.dtype, kv_data_type=problem.dtype,
    )  # fmt: skip
    return [functools.partial(wrapper.run, q[i], (kv[i, 0], kv[i, 1])) for i in range(problem.rotations)]


def _page_lists(problem: AttentionProblem, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's page table: (row starts, page ids, tokens in each row's last page)."""
    per_row = table.shape[1]
    starts = torch.arange(0, problem.batch * per_row + 1, per_row, dtype=torch.int32, device=table.device)
    last = problem.context - (per_row - 1) * problem.page_size
    return starts, table.reshape(-1), torch.full((problem.batch,), last, dtype=torch.int32, device=table.device)
