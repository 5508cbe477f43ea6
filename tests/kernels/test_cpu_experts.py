"""The grouped products on the CPU against their plain references."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.experts.experts import (
    SortedRows,
    group_rows,
    grouped_linear,
    grouped_linear_reference,
    sum_of_experts,
    sum_of_experts_reference,
)
from penstock.kernels.experts.held_experts import held_experts
from tests.kernels.tolerances import assert_near

E, K = 6, 3


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def some_ids(num_tokens: int) -> Tensor:
    """Different experts for each token; the last expert is not used."""
    return torch.rand(num_tokens, E - 1).argsort(-1)[:, :K].int()


def by_row(x: Tensor, grouped: SortedRows) -> Tensor:
    """[T, k, ...] in the order of rows."""
    return x.index_select(0, grouped.places).view(-1, K, x.shape[1])


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 40])
def test_rows_by_expert(num_tokens: int) -> None:
    ids = some_ids(num_tokens)
    grouped = group_rows(ids, E)
    assert isinstance(grouped, SortedRows)
    flat = ids.flatten()
    assert torch.equal(grouped.rows[grouped.places], torch.arange(len(flat)))
    found = [(expert, grouped.rows[begin:end].tolist()) for expert, begin, end in grouped.experts]
    assert found == [(e, rows) for e in range(E) if (rows := (flat == e).nonzero().flatten().tolist())]


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", ["", "bias", "scales", "bias, scales"])
def test_products(num_tokens: int, dtype: torch.dtype, options: str) -> None:
    """From tokens to rows, on to other rows, and to sums."""
    ids, x = some_ids(num_tokens), torch.randn(num_tokens, 24).to(dtype)
    up, down = (torch.randn(E, 20, 24) / 5).to(dtype), (torch.randn(E, 24, 20) / 5).to(dtype)
    bias = torch.randn(E, 20).to(dtype) if "bias" in options else None
    weights = torch.rand(num_tokens, K)
    scales = weights if "scales" in options else None
    grouped = group_rows(ids, E)
    assert isinstance(grouped, SortedRows)
    rows = grouped_linear(x, grouped, up, bias, of_tokens=True, scales=scales)
    inputs = x[:, None].expand(-1, K, -1)
    if scales is not None:
        inputs = inputs * scales[:, :, None].to(dtype)
    expected = grouped_linear_reference(inputs, ids, up, bias)
    assert_near(by_row(rows, grouped), expected)
    rows = grouped_linear(rows, grouped, down)
    assert_near(by_row(rows, grouped), grouped_linear_reference(expected, ids, down), factor=2)
    of_rows = None if scales is not None else weights
    got = sum_of_experts(rows, grouped, of_rows)
    assert got.dtype == dtype
    assert_near(got, sum_of_experts_reference(by_row(rows, grouped), of_rows))


def test_shapes_are_checked() -> None:
    grouped = group_rows(some_ids(2), E)
    with pytest.raises(ValueError, match="ids must be int32"):
        group_rows(torch.zeros(2, 2, dtype=torch.int64), E)
    for x, weight, of_tokens in (
        (torch.zeros(2, 8), torch.zeros(E, 4, 8), False),
        (torch.zeros(6, 8), torch.zeros(E, 4, 8), True),
        (torch.zeros(6, 8), torch.zeros(E, 4, 7), False),
        (torch.zeros(6, 8), torch.zeros(E, 8, 4).mT, False),
    ):
        with pytest.raises(ValueError, match="do not fit 6 rows" if not of_tokens else "do not fit 2 rows"):
            grouped_linear(x, grouped, weight, of_tokens=of_tokens)
    with pytest.raises(ValueError, match="does not fit 6 rows"):
        sum_of_experts(torch.zeros(2, 8), grouped)


@pytest.mark.parametrize("num_tokens", [0, 1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_compute_each_row_once(num_tokens: int, dtype: torch.dtype) -> None:
    """Each rank its own experts, some of which have copies: the parts add up to the whole, and so do counts."""
    ids, x = some_ids(num_tokens), torch.randn(num_tokens, 24).to(dtype)
    up, down = (torch.randn(E, 20, 24) / 5).to(dtype), (torch.randn(E, 24, 20) / 5).to(dtype)
    weights, turns = torch.rand(num_tokens, K), torch.randint(0, 1000, (num_tokens,))
    ranks_of = ((0,), (0, 1, 2), (1,), (1, 2), (2,), (0,))
    total, counted = torch.zeros(num_tokens, 24), torch.zeros(E, dtype=torch.int64)
    for rank in range(3):
        held = held_experts(rank, ranks_of, torch.device("cpu"))
        here = [expert for expert, ranks in enumerate(ranks_of) if rank in ranks]
        numbers = held.counted(ids, turns)
        assert torch.equal(numbers < held.num_held, held.ranks_of(ids, turns) == rank)
        counted[here] += held.tokens[:-1]
        grouped = group_rows(numbers, held.num_held, are_some=True)
        assert grouped.rows.shape[0] == int((numbers < held.num_held).sum()), "others' rows are not computed"
        inner = grouped_linear(x, grouped, up[here], of_tokens=True)
        total += sum_of_experts(grouped_linear(inner, grouped, down[here]), grouped, weights).float()
    every = x[:, None].expand(-1, K, -1)
    rows = grouped_linear_reference(grouped_linear_reference(every, ids, up), ids, down)
    assert_near(total.to(dtype), sum_of_experts_reference(rows, weights), factor=4)
    assert torch.equal(counted, ids.flatten().bincount(minlength=E))
