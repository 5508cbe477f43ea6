"""The arithmetic of graphs of steps with chunks, without a GPU: sizes, padding, and which steps fit which graph."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.steps.host_step import HostBatch
from penstock.gpu_worker.steps.mixed_graphs import GraphSize, MixedGraphs, mixed_sizes, padded_mixed
from penstock.models.description.decoder import Decoder


def decoder(weights_per_layer: int = 1000, num_layers: int = 2) -> Decoder:
    size = SimpleNamespace(hidden_size=4, vocab_size=10, layers=(None,) * num_layers)
    return cast(Decoder, SimpleNamespace(**vars(size), num_step_weights=40 + weights_per_layer * num_layers))


def batch(num_new: list[int], sample_idx: list[int] | None = None) -> HostBatch:
    n = len(num_new)
    return HostBatch(
        np.arange(n, dtype=np.int32)[::-1].copy(),
        np.arange(10, 10 + n, dtype=np.int32),
        np.array(num_new, dtype=np.int32),
        np.array(range(n) if sample_idx is None else sample_idx, dtype=np.int64),
    )


def graphs(sizes: list[GraphSize], max_model_len: int = 1000) -> MixedGraphs:
    nothing: Any = None
    parts = (nothing, nothing, nothing, nothing, CpuDevice(1))
    return MixedGraphs(*parts, dummy_row=9, sizes=sizes, max_model_len=max_model_len)


@pytest.mark.parametrize("most_rows", [1, 4, 64, 256, 512])
@pytest.mark.parametrize("num_batched", [1, 24, 64, 100, 2048, 8192])
def test_every_step_up_to_the_largest_size_fits(most_rows: int, num_batched: int) -> None:
    sizes = mixed_sizes(decoder(), num_batched, most_rows, 4096)
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[0].num_tokens == min(num_batched, 2048)
    assert len(sizes) <= 27
    found = graphs(sizes, 4096)
    for num_tokens in range(1, sizes[0].num_tokens + 1):
        for n in {1, min(num_tokens, most_rows)}:
            step = batch([num_tokens - n + 1] + [1] * (n - 1))
            size = found.size_for(step)
            assert size is not None
            assert size.num_tokens >= num_tokens
            assert size.num_tokens - num_tokens < max(64, num_tokens)
            padded = padded_mixed(step, size, 9)
            assert padded[2].sum() == size.num_tokens


def test_models_with_large_layers_need_graphs_of_short_steps_only() -> None:
    of_600m = {size.num_tokens for size in mixed_sizes(decoder(15_700_000), 8192, 256, 4096)}
    of_8b = {size.num_tokens for size in mixed_sizes(decoder(218_000_000), 8192, 256, 4096)}
    assert max(of_600m) == 2048
    assert of_8b == {64, 128, 256, 384, 512}


def test_rows_are_not_longer_than_they_may_be() -> None:
    sizes = mixed_sizes(decoder(), 2048, 256, 20)
    assert all(size.num_tokens <= 20 * size.num_rows for size in sizes)
    long = graphs([GraphSize(64, 8)], 20)
    assert long.size_for(batch([20, 20])) is None  # the dummy row would have 24 tokens
    assert long.size_for(batch([20, 20, 4])) == GraphSize(64, 8)


def test_padding_is_a_chunk_of_the_dummy_row_and_rows_without_tokens() -> None:
    padded = padded_mixed(batch([3, 1], sample_idx=[1]), GraphSize(8, 4), 9)
    assert padded.tolist() == [[1, 0, 9, 9], [10, 11, 0, 0], [3, 1, 4, 0], [1, 0, 0, 0]]
    full = padded_mixed(batch([7, 1]), GraphSize(8, 2), 9)
    assert full.tolist() == [[1, 0], [10, 11], [7, 1], [0, 1]]


def test_a_row_is_needed_for_missing_tokens() -> None:
    found = graphs([GraphSize(16, 4), GraphSize(8, 4), GraphSize(8, 2)])
    assert found.size_for(batch([7, 1])) == GraphSize(8, 2)
    assert found.size_for(batch([6, 1])) == GraphSize(8, 4)
    assert found.size_for(batch([5, 1, 1, 1])) == GraphSize(8, 4)
    assert found.size_for(batch([4, 1, 1, 1])) is None
    assert found.size_for(batch([17])) is None


def test_trees_of_drafts_go_without() -> None:
    tree = batch([2, 1])._replace(paths=np.zeros((2, 3), dtype=np.int32))
    assert graphs([GraphSize(8, 4)]).size_for(tree) is None
