"""Rows change hands without leaving anything of their last sequence behind."""

import numpy as np
import pytest
import torch

from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.state.row_state import RowState
from penstock.ipc.messages import NewRow, SamplingParams, StepPlan
from penstock.kernels.sampling.sampling import SamplingNeeds, sample

PLAIN = SamplingParams(max_tokens=9, temperature=0.0)


def int32(*values: int) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


def new_row(row: int, tokens: list[int], sampling: SamplingParams = PLAIN, pages: tuple[int, ...] = ()) -> NewRow:
    return NewRow(row, int32(*tokens), len(tokens), sampling, int32(*pages))


def plan(new: tuple[NewRow, ...] = (), **fields: bytes) -> StepPlan:
    return StepPlan(0, b"", b"", b"", b"", new, **fields)


@pytest.fixture
def state() -> RowState:
    return RowState(max_num_seqs=4, max_model_len=20, page_size=4, device=CpuDevice(1))


def test_tokens_and_pages(state: RowState) -> None:
    state.apply(plan((new_row(2, [5, 6, 7], pages=(9, 8)), new_row(0, [1], pages=(4,)))))
    state.apply(plan(page_rows=int32(0, 2), page_counts=int32(2, 1), page_ids=int32(11, 12, 13)))
    assert state.token_ids[2, :3].tolist() == [5, 6, 7]
    assert state.token_ids[0, :1].tolist() == [1]
    assert state.page_table[2, :3].tolist() == [9, 8, 13]
    assert state.page_table[0, :3].tolist() == [4, 11, 12]


def test_a_row_freed_and_taken_in_one_plan(state: RowState) -> None:
    state.apply(plan((new_row(1, [5, 6, 7], pages=(9, 8)),)))
    state.apply(plan((new_row(1, [3], pages=(2,)),), freed_rows=int32(1)))
    state.apply(plan(page_rows=int32(1), page_counts=int32(1), page_ids=int32(6)))
    assert state.page_table[1, :2].tolist() == [2, 6]


def test_needs_follow_the_rows(state: RowState) -> None:
    busy = SamplingParams(max_tokens=9, temperature=0.7, top_k=3, top_p=0.5, min_p=0.1, presence_penalty=1.0)
    waiting = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=2, stop_token_ids=(4,), top_k=5)
    state.apply(plan((new_row(0, [1]), new_row(1, [1], busy), new_row(2, [1, 2, 3], waiting))))
    at = np.array([3])
    assert state.needs(np.array([0]), at).nothing
    assert state.needs(np.array([1]), at) == SamplingNeeds(
        random=True, penalties=True, min_p=True, top_k=True, top_p=True
    )
    assert state.needs(np.array([2]), at) == SamplingNeeds(min_tokens=True)  # greedy: top_k means nothing
    assert state.needs(np.array([2]), np.array([5])).nothing  # two outputs exist
    state.apply(plan((new_row(1, [1]),)))
    assert state.needs(np.array([0, 1]), np.array([3, 3])).nothing


def test_lists_of_a_row_s_last_sequence_are_gone(state: RowState) -> None:
    biased = SamplingParams(max_tokens=9, temperature=0.0, logit_bias=tuple((i, 50.0) for i in range(3, 20)))
    held = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=5, stop_token_ids=(2, 1))
    state.apply(plan((new_row(0, [1], biased), new_row(1, [1], held))))
    logits = torch.zeros(2, 32)
    logits[:, 2] = 1.0
    rows, positions = torch.tensor([0, 1]), torch.tensor([1, 1])
    needs = SamplingNeeds(bias=True, min_tokens=True)
    assert sample(logits.clone(), rows, positions, state.sampling, needs).tolist() == [3, 0]
    state.apply(plan((new_row(0, [1]), new_row(1, [1], biased))))
    assert sample(logits.clone(), rows, positions, state.sampling, needs).tolist() == [2, 3]
    state.clear()
    assert state.needs(np.array([0, 1]), np.array([1, 1])).nothing
