"""Page groups: layers that see a window take pages as they go, free them behind it, and share prefixes."""

from random import Random

import pytest

from penstock.core.kv.kv_pages import KVPages
from penstock.core.kv.page_groups import make_pages
from penstock.core.kv.window_pages import WindowTable
from penstock.core.sequences.limits import WorkerLimits
from tests.core.driver import Driver, make_limits, make_request
from tests.core.fake_worker import solo_run
from tests.core.scheduling.test_scheduler_traces import random_limits, random_trace

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


@pytest.mark.parametrize("num_pages", [3, 5, 9, 14, 20, 33])
@pytest.mark.parametrize("windows", [[(4, 8)], [(1, 3)], [(16, 60)], [(8, 20), (2, 5)]], ids=str)
def test_the_longest_sequence_fits_and_one_more_page_would_not(num_pages: int, windows: list[tuple[int, int]]) -> None:
    limits = make_limits(num_pages=num_pages, windows=windows, max_num_batched_tokens=8, max_model_len=120)
    longest = limits.max_sequence_len
    if longest < 2:
        return
    for num_prompt in {1, longest // 2, longest - 1} - {0}:
        driver = Driver(limits)
        driver.add(make_request("other", range(500, 501), 1))
        driver.add(make_request("longest", range(num_prompt), longest - num_prompt))
        driver.run()
        assert len(driver.outputs["longest", 0]) == longest - num_prompt
        driver.check_idle()
    sizes = [limits.page_size, *(size for size, _ in windows)]
    if longest < limits.max_model_len:
        needed = [-(-(longest + 1) // size) for size in sizes]
        most = [needed[0], *(2 + -(-(window + limits.page_size) // size) for size, window in windows)]
        assert sum(map(min, needed, most)) > num_pages


def table_of(driver: Driver, request_id: str, group: int = 0) -> WindowTable:
    (seq,) = driver.scheduler.requests[request_id].running
    return seq.window_tables[group]


@pytest.mark.parametrize("caching", [True, False])
def test_a_long_sequence_holds_no_more_than_its_window(caching: bool) -> None:
    """A prompt of 400 tokens in chunks of 32, then 80 outputs; the window of 20 lies in six pages of 4 at most."""
    limits = make_limits(num_pages=44, page_size=16, max_num_batched_tokens=32, max_model_len=500, windows=[(4, 20)])
    driver = Driver(limits, enable_prefix_caching=caching)
    driver.add(make_request("a", range(400), 80))
    most = 0
    while driver.step():
        for seq in driver.scheduler.running:
            most = max(most, len(seq.window_tables[0].page_ids))
    assert most <= (20 + 2 * 32) // 4 + 2, "the window, and two chunks in flight"
    assert not driver.scheduler.totals.num_preemptions
    assert len(driver.outputs["a", 0]) == 80
    driver.check_idle()


def test_what_steps_in_flight_may_see_is_kept() -> None:
    driver = Driver(make_limits(page_size=1, max_model_len=64, windows=[(1, 4)]), pipeline_depth=2)
    driver.add(make_request("a", range(8), 30))
    for _ in range(6):
        driver.step()
        (seq,) = driver.scheduler.running
        assert seq.num_computed_tokens > seq.num_settled_tokens
        assert table_of(driver, "a").first == seq.num_settled_tokens - 3
    driver.run()


def test_a_prefix_is_reused_where_a_whole_window_is_left() -> None:
    """While there is room, pages behind the window stay cached: a prompt can part anywhere. Then they go first."""
    limits = make_limits(num_pages=40, page_size=4, max_model_len=128, windows=[(4, 9)])
    driver = Driver(limits)
    driver.add(make_request("a", range(40), 1))
    driver.run()
    pool, (group,) = driver.scheduler.kv.pool, driver.scheduler.kv.windows
    assert pool.num_cached == 10 + 10
    driver.add(make_request("b", [*range(22), *range(500, 510)], 1))
    driver.run()
    assert driver.num_cached["b", 0] == 20
    assert driver.scheduler.kv.reserve(pool.num_free + 8), "eight pages that were in use longest ago"
    assert 0 < len(group.idle) < 13
    driver.add(make_request("c", [*range(22), *range(600, 610)], 1))
    driver.run()
    assert driver.num_cached["c", 0] == 20, "what b had used last was kept"
    driver.add(make_request("d", [*range(10), *range(700, 710)], 1))
    driver.run()
    assert driver.num_cached["d", 0] == 0, "the first pages of the window are gone, those of the first group are there"
    num_cached = pool.num_cached
    assert driver.scheduler.reset_prefix_cache() == num_cached > 0
    assert pool.num_free == pool.num_pages
    assert not group.cached()
    assert not group.idle


def test_siblings_start_at_a_hit() -> None:
    driver = Driver(make_limits(page_size=4, windows=[(4, 6)]), pipeline_depth=1)
    request = make_request("a", range(19), 6, n=3, seed=11)
    driver.add(request)
    driver.run()
    assert driver.worker.num_copies == 0
    for idx in range(3):
        assert driver.outputs["a", idx] == solo_run(list(range(19)), request.sampling, idx, driver.limits)
        assert driver.num_cached["a", idx] == (16 if idx else 0)


def test_pages_of_different_sizes_share_borders() -> None:
    """The window's pages hold 8 tokens, the first group's 4: a sequence starts where both end."""
    driver = Driver(make_limits(num_pages=100, page_size=4, windows=[(8, 10)]))
    driver.add(make_request("a", range(23), 1))
    driver.run()
    driver.add(make_request("b", range(23), 1))
    driver.run()
    assert driver.num_cached["b", 0] == 16


def test_the_longest_sequence_fits_alone() -> None:
    limits = make_limits(num_pages=20, page_size=4, max_num_batched_tokens=7, max_model_len=500, windows=[(2, 9)])
    length = limits.max_sequence_len
    assert 20 < length < 80
    for depth in (0, 1, 2):
        driver = Driver(limits, pipeline_depth=depth)
        driver.add(make_request("a", range(30), length))
        driver.run()
        assert len(driver.outputs["a", 0]) == length - 30


def test_one_group_needs_no_more_than_before() -> None:
    assert type(make_pages(4, 4, (), enable_prefix_caching=True)) is KVPages
    driver = Driver(make_limits())
    driver.add(make_request("a", range(9), 4))
    driver.run()
    assert not any(step.plan.window_pages for step in driver.steps)
