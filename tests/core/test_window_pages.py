"""Page groups: layers that see a window take pages as they go, free them behind it, and share prefixes."""

from random import Random

import pytest

from penstock.core.sequences.worker_limits import WorkerLimits
from tests.core.driver import make_limits
from tests.core.test_scheduler_traces import random_limits, random_trace

NUM_SEEDS = 120


def window_limits(rng: Random) -> WorkerLimits:
    """Two or three groups in a pool that is small enough for preemptions."""
    limits = random_limits(rng)
    groups = [(rng.choice([1, 2, 4, 8, 16]), rng.choice([1, 3, 8, 20, 60])) for _ in range(rng.choice([1, 1, 1, 2]))]
    spare = sum(3 + -(-(window + limits.page_size) // size) for size, window in groups)
    return make_limits(
        num_pages=limits.num_pages + rng.choice([spare, spare + 4, 3 * spare]),
        page_size=limits.page_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        windows=groups,
    )


@pytest.mark.parametrize("first_seed", range(0, NUM_SEEDS, 40))
def test_every_sequence_has_its_solo_output(first_seed: int) -> None:
    """The fake worker reads each position's window back through the group's page table."""
    for seed in range(first_seed, first_seed + 40):
        try:
            random_trace(seed, window_limits)
        except BaseException as error:
            error.add_note(f"trace of seed {seed}")
            raise


def test_the_traces_reach_what_they_are_for() -> None:
    preemptions = cached = reads = 0
    for seed in range(NUM_SEEDS, NUM_SEEDS + 30):
        driver = random_trace(seed, window_limits)
        preemptions += sum(totals.num_preemptions for totals in driver.totals)
        cached += sum(totals.num_cached_tokens for totals in driver.totals)
        reads += driver.worker.num_window_reads
    reached = (preemptions, cached, reads)
    assert min(reached) > 15, reached
