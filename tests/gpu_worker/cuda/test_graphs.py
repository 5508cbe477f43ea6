"""The arithmetic of graphs, without a GPU: sizes, padding, and which steps they cover."""

import numpy as np
import pytest

from penstock.gpu_worker.steps.cuda_graphs import graph_sizes, is_decode, padded_batch
from penstock.gpu_worker.steps.host_step import HostBatch


def batch(rows: list[int], num_new: list[int] | None = None, sample_idx: list[int] | None = None) -> HostBatch:
    n = len(rows)
    return HostBatch(
        np.array(rows, dtype=np.int32),
        np.arange(10, 10 + n, dtype=np.int32),
        np.array(num_new or [1] * n, dtype=np.int32),
        np.array(range(n) if sample_idx is None else sample_idx, dtype=np.int64),
    )


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 8, 9, 64, 100, 256, 257, 300, 512, 4096])
def test_sizes_cover_every_batch_with_little_waste(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[0] == min(max_num_seqs, 512)
    assert sizes[-1] == 1
    for n in range(1, sizes[0] + 1):
        smallest = min(size for size in sizes if size >= n)
        assert smallest - n < max(8, n / 8 + 1)


def test_padding_names_the_dummy_row_at_its_first_position() -> None:
    assert padded_batch(batch([5, 2, 7]), 4, 9).tolist() == [[5, 2, 7, 9], [10, 11, 12, 0]]
    assert padded_batch(batch([5]), 1, 9).tolist() == [[5], [10]]


def test_only_steps_of_sampling_single_tokens_are_decodes() -> None:
    assert is_decode(batch([3, 1]))
    assert not is_decode(batch([3, 1], num_new=[1, 2]))
    assert not is_decode(batch([3, 1], sample_idx=[0]))  # a prompt's chunk of one token
    assert not is_decode(batch([3, 1], num_new=[2, 1], sample_idx=[1]))
