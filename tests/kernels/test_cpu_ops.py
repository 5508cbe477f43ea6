"""The CPU path of every operation against its plain reference."""

import math
from itertools import product
from typing import NamedTuple, get_args

import pytest
import torch
from torch import Tensor

from penstock.kernels.activation import (
    ActivationKind,
    activation,
    activation_reference,
    gated_activation,
    gated_activation_reference,
)
from penstock.kernels.attention import paged_attention_cpu
from penstock.kernels.attention.copy_pages import copy_pages, copy_pages_reference
from penstock.kernels.attention.paged_attention import paged_attention, paged_attention_reference
from penstock.kernels.attention.paged_attention_cpu import first_seen
from penstock.kernels.attention.qk_norm_rope_write import (
    qk_norm_rope_write,
    qk_norm_rope_write_cpu,
    qk_norm_rope_write_reference,
    query_growth,
    slot_cells,
)
from penstock.kernels.norms import NormWeights, add_norm, add_norm_reference, norm, norm_reference
from penstock.kernels.prepare_inputs import prepare_inputs, prepare_inputs_reference
from tests.kernels.norm_cases import NORMS, QK_CASES, QKCase, make_qk_inputs, norm_weights
from tests.kernels.pairs import every

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 2e-2 if expected.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "num_tokens", "kind"), list(product(DTYPES, (1, 7), NORMS)))
def test_norms(dtype: torch.dtype, num_tokens: int, kind: str) -> None:
    x, residual = torch.randn(2, num_tokens, 48).to(dtype).unbind(0)
    weights, post = norm_weights(kind, 48, dtype), norm_weights(kind, 48, dtype)
    given = x.clone()
    close(norm(x, weights), norm_reference(x, weights))
    for arguments in ((weights,), (weights, 0.22), (weights, 0.5, post), (None, 1.0, post)):
        expected = add_norm_reference(x, residual, *arguments)
        normed, total = add_norm(x, residual, *arguments)
        close(normed, expected[0])
        close(total, expected[1])
        assert total is residual
    assert torch.equal(x, given)
    assert norm(torch.zeros(1, 48, dtype=dtype), weights).isfinite().all()


@pytest.mark.parametrize(("dtype", "kind"), list(product(DTYPES, get_args(ActivationKind))))
def test_activations(dtype: torch.dtype, kind: ActivationKind) -> None:
    gate_up = (torch.randn(5, 64) * 6).to(dtype)
    given = gate_up.clone()
    close(gated_activation(gate_up, kind), gated_activation_reference(gate_up, kind))
    if kind != "clamped_swiglu":
        close(activation(gate_up, kind), activation_reference(gate_up, kind))
    assert torch.equal(gate_up, given)
    assert gated_activation(torch.full((1, 4), torch.nan), kind).isnan().all()


@pytest.mark.parametrize(("dtype", "case", "with_positions", "padded"), [
    *product(DTYPES, QK_CASES[:4], (False, True), (False, True)),
    *((dtype, case, True, False) for dtype, case in product(DTYPES, QK_CASES[4:])),
])  # fmt: skip
def test_qk_norm_rope_write(dtype: torch.dtype, case: QKCase, with_positions: bool, padded: bool) -> None:
    case = case._replace(dtype=dtype)
    inputs = make_qk_inputs(case, with_positions)
    qkv = inputs.args[0]
    slots = torch.tensor([5, -1, 0, 22, -1, 11] if padded else [5, 9, 0, 22, 23, 11])
    pages = [torch.zeros(6, case.num_kv_heads, 4, case.head_dim, dtype=dtype) for _ in range(6)]
    expected = qk_norm_rope_write_reference(*inputs.args, pages[0], pages[1], slots, inputs.q_scale)
    results = [qk_norm_rope_write(qkv.clone(), *inputs.args[1:], pages[2], pages[3], slots, inputs.q_scale)]
    if not padded:
        cells = slot_cells(slots, case.num_kv_heads, 4)
        results.append(qk_norm_rope_write_cpu(qkv.clone(), *inputs.args[1:], pages[4], pages[5], cells, inputs.q_scale))
    for q, keys, values in zip(results, pages[2::2], pages[3::2], strict=False):
        close(q, expected)
        close(keys, pages[0])
        close(values, pages[1])
    q_only, before = qkv[:, : case.num_q_heads * case.head_dim], pages[2].clone()
    of_q = (*inputs.args[1:3], inputs.args[3]._replace(k=None))
    alone = qk_norm_rope_write(q_only.clone(), *of_q, pages[2], pages[3], slots, inputs.q_scale, writes=False)
    assert torch.equal(alone, results[0])
    assert torch.equal(pages[2], before)


def test_query_growth() -> None:
    growth = query_growth(torch.tensor([0, 8190, 8191, 100000]), beta=0.1, length=8192.0, shift=1)
    torch.testing.assert_close(growth, torch.tensor([1.0, 1.0, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(13)]))


class Attention(NamedTuple):
    """Lengths of a batch, and what the layer asks for."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    window: int | None = None
    softcap: float = 0.0
    with_sinks: bool = False


BATCHES = [
    ((1,), (1,)),
    ((1, 1, 1), (5, 40, 300)),
    ((1, 1, 1, 1), (16, 16, 17, 15)),
    ((1, 7, 30), (9, 7, 100)),
    ((300, 5, 1), (600, 64, 33)),
]
ATTENTION = [
    Attention(*batch, window, softcap, with_sinks)
    for batch, window, softcap, with_sinks in product(BATCHES, (None, 1, 16, 40, -16, -40), (0.0, 5.0), (False, True))
]


def attention_inputs(
    case: Attention,
    page_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 16,
) -> tuple[Tensor, ...]:
    needed = [-(-n // page_size) for n in case.seq_lens]
    num_pages = sum(needed) + 3
    ids = torch.randperm(num_pages, dtype=torch.int32)
    # What lies past a row's pages, or behind its window, need not name a page of this pool.
    page_table = torch.full((len(needed), max(needed) + 2), 1 << 20, dtype=torch.int32)
    for row, (pages, count) in enumerate(zip(torch.split(ids, [*needed, 3]), needed, strict=False)):
        first = first_seen(case.seq_lens[row] - case.query_lens[row], case.window) // page_size
        page_table[row, first:count] = pages[first:]
    k, v = torch.randn(2, num_pages, num_kv_heads, page_size, head_dim).to(dtype).unbind(0)
    q = torch.randn(sum(case.query_lens), num_q_heads, head_dim).to(dtype)
    starts = torch.tensor([0, *case.query_lens]).cumsum(0).int()
    return q, k, v, page_table, starts, int32(*case.seq_lens)


def check_attention(case: Attention, inputs: tuple[Tensor, ...]) -> None:
    q, k, v, page_table, starts, seq_lens = inputs
    sinks = torch.randn(q.shape[1]) if case.with_sinks else None
    expected = paged_attention_reference(
        q, k, v, page_table, starts, seq_lens, scale=0.3, window=case.window, softcap=case.softcap, sinks=sinks
    )
    out = torch.empty_like(q)
    result = paged_attention(
        q,
        k,
        v,
        page_table,
        starts,
        seq_lens,
        scale=0.3,
        max_query_len=max(case.query_lens),
        max_seq_len=max(case.seq_lens),
        window=case.window,
        softcap=case.softcap,
        sinks=sinks,
        out=out,
    )
    assert result is out
    close(result, expected)


@pytest.mark.parametrize(("case", "page_size"), list(product(ATTENTION, (1, 16))))
def test_paged_attention(case: Attention, page_size: int) -> None:
    check_attention(case, attention_inputs(case, page_size, 4, 2))


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(3, 3), (6, 1), (16, 1), (12, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention_head_groups(num_q_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    case = Attention((1, 9, 1), (70, 40, 33))
    check_attention(case, attention_inputs(case, 64, num_q_heads, num_kv_heads, dtype))


@pytest.mark.parametrize(
    ("head_dim", "page_size", "window", "softcap", "with_sinks", "dtype"),
    every((32, 80, 96, 112, 192, 256, 512), (1, 16, 64), (None, 9, 33, -33), (0.0, 5.0), (False, True), tuple(DTYPES)),
)
def test_paged_attention_combinations(
    head_dim: int, page_size: int, window: int | None, softcap: float, with_sinks: bool, dtype: torch.dtype
) -> None:
    case = Attention((1, 1, 9, 20, 1), (50, 3, 41, 70, 64), window, softcap, with_sinks)
    check_attention(case, attention_inputs(case, page_size, 6, 2, dtype, head_dim))


@pytest.mark.parametrize(("window", "softcap"), [(None, 0.0), (70, 0.0), (-70, 0.0), (None, 5.0)])
def test_paged_attention_in_pieces(monkeypatch: pytest.MonkeyPatch, window: int | None, softcap: float) -> None:
    """Long contexts are cut; here short ones are, as finely."""
    monkeypatch.setattr(paged_attention_cpu, "CONTEXT_PIECE", 50)
    monkeypatch.setattr(paged_attention_cpu, "QUERY_PIECE", 24)
    monkeypatch.setattr(paged_attention_cpu, "GATHER_TOKENS", 256)
    case = Attention((130, 1, 1, 1, 40), (290, 200, 190, 9, 40), window, softcap, with_sinks=True)
    check_attention(case, attention_inputs(case, 16, 4, 2))


def test_copy_pages() -> None:
    blocks = torch.randn(4, 6, 64)
    expected = blocks.clone()
    copy_pages_reference(expected, int32(4, 0), int32(1, 3))
    copy_pages(blocks, int32(4, 0), int32(1, 3))
    assert torch.equal(blocks, expected)
    assert torch.equal(blocks[:, 1], blocks[:, 4])


@pytest.mark.parametrize("num_new", [(1, 1, 1), (4, 1, 9), (3, 3, 3)])
def test_prepare_inputs(num_new: tuple[int, ...]) -> None:
    token_ids = torch.randint(0, 1000, (8, 33), dtype=torch.int32)
    page_table = torch.randint(0, 1000, (8, 9), dtype=torch.int32)
    arguments = (int32(6, 0, 3), int32(5, 0, 20), int32(*num_new), sum(num_new), token_ids, page_table, 4)
    for actual, expected in zip(prepare_inputs(*arguments), prepare_inputs_reference(*arguments), strict=True):
        assert torch.equal(actual, expected)
        assert actual.dtype == expected.dtype


def test_wrong_shapes_are_refused() -> None:
    q, k, v, page_table, starts, seq_lens = attention_inputs(Attention((1, 1), (4, 5)), 4, 4, 2)
    with pytest.raises(ValueError, match="does not fit pages"):
        paged_attention(q[:, :, :8], k, v, page_table, starts, seq_lens, scale=1, max_query_len=1, max_seq_len=5)
    with pytest.raises(ValueError, match="cannot share"):
        paged_attention(q[:, :3], k, v, page_table, starts, seq_lens, scale=1, max_query_len=1, max_seq_len=5)
    with pytest.raises(ValueError, match="query_start_loc"):
        paged_attention(q, k, v, page_table, starts[:-1], seq_lens, scale=1, max_query_len=1, max_seq_len=5)
    with pytest.raises(ValueError, match="weight"):
        norm(torch.zeros(2, 8), NormWeights(torch.ones(7)))
    with pytest.raises(ValueError, match="only a LayerNorm"):
        norm(torch.zeros(2, 8), NormWeights(torch.ones(8), bias=torch.ones(8)))
    with pytest.raises(ValueError, match="gate_up"):
        gated_activation(torch.zeros(2, 7), "silu")
    with pytest.raises(ValueError, match="needs no gate"):
        activation(torch.zeros(2, 8), "clamped_swiglu")
    with pytest.raises(ValueError, match="src"):
        copy_pages(torch.zeros(2, 3, 1), int32(0), int32(1, 2))
