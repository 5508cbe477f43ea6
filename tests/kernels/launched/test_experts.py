"""Routing and the grouped products of experts."""

import pytest
import torch

from penstock.kernels.routing import Routing, route_reference
from penstock.kernels.triton.routing import route_triton
from tests.kernels.routings import ROUTINGS


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
