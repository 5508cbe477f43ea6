"""Routing and the grouped products of experts."""

import pytest
import torch

from penstock.kernels.experts.experts import grouped_linear_reference, sum_of_experts_reference
from penstock.kernels.experts.held_experts import held_experts
from penstock.kernels.experts.routing import Routing, route_reference, router_logits
from penstock.kernels.triton.experts.experts import (
    group_rows_triton,
    grouped_linear_triton,
    num_blocks,
    sum_of_experts_triton,
)
from penstock.kernels.triton.experts.logits import MOST_TOKENS, router_logits_triton
from penstock.kernels.triton.experts.routing import route_triton
from tests.kernels.routings import ROUTINGS
from tests.kernels.tolerances import assert_near


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [96, 2880])
def test_router_logits(device: str, dtype: torch.dtype, width: int, has_bias: bool) -> None:
    """In fp32, whatever the inputs are; of rows that are apart, too."""
    weight = torch.randn(12, width, device=device) / width**0.5
    bias = torch.randn(12, device=device) if has_bias else None
    x = torch.randn(5, 2 * width, device=device).to(dtype)[:, :width]
    got = router_logits_triton(x, weight, bias)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    assert router_logits_triton(x[:0], weight, bias).shape == (0, 12)


def test_few_tokens_have_a_launch_of_their_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And many are multiplied as other matrices are."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    weight = torch.randn(12, 96, device=device)
    x = torch.randn(MOST_TOKENS + 1, 96, device=device).half()
    many, few = router_logits(x, weight), router_logits(x[1:], weight)
    assert torch.equal(few, router_logits_triton(x[1:], weight, None))
    torch.testing.assert_close(many[1:], few, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("num_experts", [12, 60])
def test_routing(device: str, name: str, num_experts: int) -> None:
    correction = torch.randn(num_experts, device=device) if "corrected" in name else None
    for logits in (
        3 * torch.randn(7, num_experts, device=device),
        torch.randint(-1, 2, (7, num_experts), device=device).float(),  # of equals, the lowest comes first
        torch.randn(1, num_experts, device=device),
        torch.zeros(0, num_experts, device=device),
    ):
        if correction is not None:
            correction = correction.round(decimals=1)
        ids, weights = route_triton(logits, ROUTINGS[name], correction)
        expected_ids, expected = route_reference(logits, ROUTINGS[name], correction)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy in the interpreter: NaN
@pytest.mark.parametrize("name", ROUTINGS)
def test_invalid_logits_disturb_no_other_token(device: str, name: str) -> None:
    correction = torch.randn(12, device=device) if "corrected" in name else None
    logits = torch.randn(5, 12, device=device)
    expected = route_triton(logits, ROUTINGS[name], correction)
    logits[1], logits[3] = float("nan"), float("-inf")
    logits[3, 0] = float("inf")
    ids, weights = route_triton(logits, ROUTINGS[name], correction)
    assert torch.equal(ids[::2], expected[0][::2])
    assert torch.equal(weights[::2], expected[1][::2])
    assert all(len(set(row)) == len(row) and set(row) <= set(range(12)) for row in ids.tolist())


def test_routing_of_many_experts(device: str) -> None:
    logits = torch.randn(2, 384, device=device)
    routing = Routing(top_k=8, kind="sigmoid", renormalize=True, renormalize_eps=1e-20, scale=2.827)
    correction = torch.randn(384, device=device)
    ids, weights = route_triton(logits, routing, correction)
    expected_ids, expected = route_reference(logits, routing, correction)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=2e-5, atol=1e-6)


def some_ids(num_tokens: int, num_experts: int, top_k: int, device: str) -> torch.Tensor:
    """Different experts for each token; the last expert is not used."""
    return torch.rand(num_tokens, num_experts - 1, device=device).argsort(-1)[:, :top_k].int()


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [
    (1, 9, 8), (3, 128, 8), (5, 5, 1), (70, 7, 2), (300, 4, 3), (700, 6, 2),
])  # fmt: skip
def test_blocks_hold_each_row_once(device: str, num_tokens: int, num_experts: int, top_k: int) -> None:
    ids = some_ids(num_tokens, num_experts, top_k, device)
    grouped = group_rows_triton(ids, num_experts)
    flat = ids.flatten()
    assert torch.equal(grouped.rows.long(), flat.argsort(stable=True))
    blocks = [block for block in grouped.blocks.T.tolist() if block[1] < block[2]]
    assert [place for _, begin, end in blocks for place in range(begin, end)] == list(range(len(flat)))
    of_place = flat[grouped.rows.long()].tolist()
    assert all(of_place[begin:end] == [expert] * (end - begin) for expert, begin, end in blocks)
    needed = sum(-(-count // grouped.size) for count in flat.bincount().tolist())
    assert len(blocks) == needed <= grouped.blocks.shape[1] == num_blocks(len(flat), num_experts, grouped.size)


def test_one_expert_takes_all(device: str) -> None:
    grouped = group_rows_triton(torch.full((200, 1), 3, dtype=torch.int32, device=device), 5)
    blocks = [block for block in grouped.blocks.T.tolist() if block[1] < block[2]]
    assert blocks == [[3, begin, min(begin + grouped.size, 200)] for begin in range(0, 200, grouped.size)]


@pytest.mark.parametrize(("num_tokens", "num_inputs", "num_outputs"), [(1, 64, 48), (4, 72, 130), (90, 192, 64)])
@pytest.mark.parametrize("options", ["", "bias, scales"])
def test_grouped_products(
    device: str, dtype: torch.dtype, num_tokens: int, num_inputs: int, num_outputs: int, options: str
) -> None:
    """From tokens to rows, on to other rows, and to sums."""
    num_experts, top_k = 5, 2
    ids = some_ids(num_tokens, num_experts, top_k, device)
    x = torch.randn(num_tokens, num_inputs, device=device).to(dtype)
    up = (torch.randn(num_experts, num_outputs, num_inputs, device=device) / num_inputs**0.5).to(dtype)
    down = (torch.randn(num_experts, num_inputs, num_outputs, device=device) / num_outputs**0.5).to(dtype)
    bias = torch.randn(num_experts, num_outputs, device=device).to(dtype) if "bias" in options else None
    weights = torch.rand(num_tokens, top_k, device=device)
    scales = weights if "scales" in options else None
    grouped = group_rows_triton(ids, num_experts)
    rows = grouped_linear_triton(x, grouped, up, bias, of_tokens=True, scales=scales)
    inputs = x[:, None].float().expand(-1, top_k, -1) * (1 if scales is None else scales[:, :, None])
    expected = grouped_linear_reference(inputs, ids, up, bias)
    assert_near(rows.view_as(expected), expected.to(dtype), factor=2)
    rows = grouped_linear_triton(rows, grouped, down, None)
    assert_near(rows.view(num_tokens, top_k, -1), grouped_linear_reference(expected.to(dtype), ids, down), factor=4)
    of_rows = None if scales is not None else weights
    got = sum_of_experts_triton(rows, grouped, of_rows)
    assert_near(got, sum_of_experts_reference(rows.view(num_tokens, top_k, -1), of_rows))


def test_no_tokens(device: str) -> None:
    grouped = group_rows_triton(torch.zeros(0, 2, dtype=torch.int32, device=device), 4)
    rows = grouped_linear_triton(
        torch.zeros(0, 32, device=device), grouped, torch.zeros(4, 16, 32, device=device), None, of_tokens=True
    )
    assert rows.shape == (0, 16)
    assert sum_of_experts_triton(rows, grouped, None).shape == (0, 16)


def test_what_is_not_a_number_stays_in_its_token(device: str) -> None:
    ids = some_ids(40, 4, 2, device)
    x, weight = torch.randn(40, 64, device=device), torch.randn(4, 32, 64, device=device)
    grouped = group_rows_triton(ids, 4)
    expected = grouped_linear_triton(x, grouped, weight, None, of_tokens=True)
    x[7] = float("nan")
    got = grouped_linear_triton(x, grouped, weight, None, of_tokens=True)
    is_its = torch.arange(80, device=device) // 2 == 7
    assert torch.equal(got[~is_its], expected[~is_its])
    assert bool(got[is_its].isnan().all())


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 5), (40, 5), (200, 4)])
def test_ranks_compute_each_row_once(device: str, num_tokens: int, num_experts: int) -> None:
    """Two ranks share the experts: what they compute adds up to the whole, and nobody reads what another has."""
    top_k = 2
    ids = some_ids(num_tokens, num_experts, top_k, device)
    x, weights = torch.randn(num_tokens, 64, device=device), torch.rand(num_tokens, top_k, device=device)
    weight = torch.randn(num_experts, 48, 64, device=device) / 8
    turns = torch.arange(num_tokens, device=device)
    ranks_of = [(0, 1), *((expert % 2,) for expert in range(1, num_experts))]
    total = torch.zeros(num_tokens, 48, device=device)
    for rank in range(2):
        held = held_experts(rank, ranks_of, torch.device(device))
        here = [expert for expert, ranks in enumerate(ranks_of) if rank in ranks]
        grouped = group_rows_triton(held.serving(ids, turns), held.num_held, are_some=True)
        rows = grouped_linear_triton(x, grouped, weight[here], None, of_tokens=True)
        is_other = (held.ranks_of(ids, turns) != rank).flatten()
        rows[is_other] = float("nan")  # nobody has written it
        total += sum_of_experts_triton(rows, grouped, weights)
    expected = grouped_linear_reference(x[:, None].expand(-1, top_k, -1), ids, weight)
    assert_near(total, sum_of_experts_reference(expected, weights), factor=4)
