"""Low-rank matrices that differ from row to row."""

from collections.abc import Sequence

import pytest
import torch

from penstock.kernels.adapting import LowRankTable, Matrices, add_low_rank_reference
from penstock.kernels.triton.adapting import add_low_rank_triton, group_by_slot_triton
from tests.kernels.tolerances import assert_near

INPUTS, SEGMENTS = 72, ((0, 80), (80, 96), (96, 112))
RANKS = (8, 0, 5, 64, 256)
"""Of the slots; the second one is empty."""


def table_of(matrices: Sequence[Sequence[Matrices]], device: str) -> LowRankTable:
    """On the device, in the midst of those of other products."""

    def entry(its: Matrices) -> tuple[int, int, int]:
        if its is None:
            return 0, 0, 0
        a, b = its
        assert b.t().is_contiguous()
        return a.data_ptr(), b.data_ptr(), len(a)

    found = [[entry(its) for its in each] for each in matrices]
    addresses = torch.zeros(len(matrices), 2 + len(SEGMENTS), 2, dtype=torch.int64)
    ranks = torch.full(addresses.shape[:2], 7, dtype=torch.int32)
    addresses[:, 1:-1] = torch.tensor([[its[:2] for its in each] for each in found])
    ranks[:, 1:-1] = torch.tensor([[its[2] for its in each] for each in found])
    places = torch.tensor(SEGMENTS, dtype=torch.int32, device=device)
    return LowRankTable(addresses.to(device)[:, 1:-1], ranks.to(device)[:, 1:-1], places, SEGMENTS, 256)


def matrices_of(rank: int, device: str, dtype: torch.dtype) -> list[Matrices]:
    """Of each segment; that of the second one has another rank, and the third one has none."""
    if not rank:
        return [None] * 3
    found: list[Matrices] = []
    for (first, end), its in zip(SEGMENTS, (rank, max(1, rank // 3), 0), strict=True):
        a = torch.randn(its, INPUTS, device=device) / INPUTS**0.5
        b = torch.randn(its, end - first, device=device) / max(1, its) ** 0.5
        found.append((a.to(dtype), b.to(dtype).t()) if its else None)  # B is stored as B^T
    return found


@pytest.mark.parametrize(
    ("lens", "slots"),
    [
        ([1] * 9, [0, -1, 2, 3, 4, 0, 1, 0, -1]),
        ([3, 21, 1, 0, 9], [4, 0, -1, 2, 0]),
        ([2, 1], [-1, -1]),
        ([170], [3]),
    ],
)
def test_each_token_gets_its_own(device: str, dtype: torch.dtype, lens: list[int], slots: list[int]) -> None:
    """Rows of any length, in any order, with a slot or without; the others' outputs stay as they are, bit by bit."""
    matrices = [matrices_of(rank, device, dtype) for rank in RANKS]
    table, num_tokens = table_of(matrices, device), sum(lens)
    rows = torch.randperm(len(lens) + 3, device=device)[: len(lens)].int()
    of_rows = torch.full((len(lens) + 3,), -1, dtype=torch.int32, device=device)
    of_rows[rows.long()] = torch.tensor(slots, dtype=torch.int32, device=device)
    starts = torch.tensor([sum(lens[:i]) for i in range(len(lens) + 1)], dtype=torch.int32, device=device)
    x = torch.randn(num_tokens, 2 * INPUTS, device=device).to(dtype)[:, :INPUTS]
    y = torch.randn(num_tokens, 128, device=device).to(dtype)
    grouped = group_by_slot_triton(rows, starts, of_rows, num_tokens, len(RANKS))
    got = y.clone()
    add_low_rank_triton(x, got, table.addresses, table.ranks, table.places, table.widest, table.most_rank, grouped)
    of_tokens = [slot for slot, count in zip(slots, lens, strict=True) for _ in range(count)]
    assert_near(got, add_low_rank_reference(x, y, of_tokens, SEGMENTS, matrices), factor=4)
    without = [i for i, slot in enumerate(of_tokens) if slot < 0 or not RANKS[slot]]
    assert torch.equal(got[without], y[without])
    assert torch.equal(got[:, 96:], y[:, 96:])


def test_a_graph_serves_any_slots_and_ranks(device: str) -> None:
    """Nothing but what the tables say changes: so a launch that was captured does what they say now."""
    matrices = [matrices_of(rank, device, torch.float32) for rank in RANKS]
    table, others = table_of(matrices, device), table_of(matrices[::-1], device)
    rows, of_rows = torch.arange(4, dtype=torch.int32, device=device), torch.zeros(4, dtype=torch.int32, device=device)
    starts = torch.arange(5, dtype=torch.int32, device=device)
    x, y = torch.randn(4, INPUTS, device=device), torch.zeros(4, 112, device=device)

    def run() -> torch.Tensor:
        out = y.clone()
        grouped = group_by_slot_triton(rows, starts, of_rows, 4, len(RANKS))
        add_low_rank_triton(x, out, table.addresses, table.ranks, table.places, table.widest, table.most_rank, grouped)
        return out

    first = run()
    of_rows.copy_(torch.tensor([3, 3, -1, 2], device=device))
    table.addresses.copy_(others.addresses)
    table.ranks.copy_(others.ranks)
    second = run()
    assert_near(first, add_low_rank_reference(x, y, [0] * 4, SEGMENTS, matrices))
    assert_near(second, add_low_rank_reference(x, y, [3, 3, -1, 2], SEGMENTS, matrices[::-1]))
