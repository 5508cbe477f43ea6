"""Sizes of steps that follow from the device."""

import pytest

from penstock.config import Config, SchedulerOptions
from penstock.config.step_limits import StepLimits, bounded

GB = 1e9


def test_a_cpu_has_small_steps() -> None:
    assert StepLimits.for_device(None) == StepLimits(max_num_seqs=64, max_num_batched_tokens=2048, page_size=16)


@pytest.mark.parametrize(
    ("memory", "num_seqs", "num_tokens"),
    [(16, 64, 2048), (24, 128, 4096), (48, 256, 4096), (80, 256, 8192), (141, 256, 8192)],
)
def test_steps_grow_with_the_memory_of_a_gpu(memory: float, num_seqs: int, num_tokens: int) -> None:
    assert StepLimits.for_device(memory * GB) == StepLimits(num_seqs, num_tokens, 16)


@pytest.mark.parametrize(("num_usual", "num_seqs"), [(1000.0, 256), (103.5, 96), (30.0, 64), (0.0, 64)])
def test_rows_need_room_in_the_pool(num_usual: float, num_seqs: int) -> None:
    """But there are as many as on the smallest device: sequences may be short."""
    assert StepLimits.for_device(80 * GB, num_usual).max_num_seqs == num_seqs


def test_options_come_first() -> None:
    options = SchedulerOptions(max_num_seqs=3, page_size=64)
    filled = StepLimits.for_device(80 * GB).fill(options)
    assert (filled.max_num_seqs, filled.max_num_batched_tokens, filled.page_size) == (3, 8192, 64)
    left = Config().scheduler
    assert (left.max_num_seqs, left.max_num_batched_tokens, left.page_size) == (0, 0, 0)


def test_an_option_bounds_the_size_of_a_worker() -> None:
    assert [bounded(option, 256) for option in (0, 100, 300)] == [256, 100, 256]
