"""Prefixes of models whose layers keep states: where sequences start, what is kept, and why they do not start later."""

from random import Random
from typing import Any

import pytest

from penstock.core.sequences.limits import WorkerLimits
from tests.core.driver import Driver, make_limits, make_request
from tests.core.scheduling.test_scheduler_traces import random_limits, random_trace
from tests.faults.soak import sized

PAGE = 4


def random_states(rng: Random) -> WorkerLimits:
    limits = random_limits(rng)
    return make_limits(
        limits.num_pages, limits.page_size, limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len,
        num_snapshots=rng.choice([0, 1, 2, 5, 20, limits.num_pages]),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(sized(40, 400)))
def test_whatever_happens_sequences_start_with_their_own_states(seed: int) -> None:
    random_trace(seed, random_states)


def test_random_traces_load_and_evict() -> None:
    """Otherwise the one before would say little."""
    drivers = [random_trace(seed, random_states) for seed in range(12)]
    totals = [driver.scheduler.snapshot_totals for driver in drivers]
    assert sum(each.num_loaded for each in totals) > 10
    assert sum(each.num_evicted for each in totals) > 10


def driver_of(num_snapshots: int, **options: Any) -> Driver:
    limits = make_limits(64, PAGE, max_num_batched_tokens=40, num_snapshots=num_snapshots)
    return Driver(limits, **options)


def ask(driver: Driver, name: str, prompt: list[int], max_tokens: int = 6) -> tuple[int, list[int], str]:
    """Return the cached tokens, the output, and why there are no more of the former."""
    driver.add(make_request(name, prompt, max_tokens))
    driver.run()
    return driver.num_cached[name, 0], driver.outputs[name, 0], driver.bills[name, 0].cache_miss


@pytest.mark.parametrize("length", range(20, 20 + PAGE))
@pytest.mark.parametrize("pipeline_depth", [0, 1])
def test_a_conversation_computes_a_page_and_the_new_turn(length: int, pipeline_depth: int) -> None:
    driver = driver_of(8, pipeline_depth=pipeline_depth)
    text = list(range(100, 100 + length))
    cached, output, why = ask(driver, "first", text)
    assert (cached, why) == (0, "no_pages")
    for turn in ("second", "third"):
        before = [*text, *output]
        text = [*before, *range(300, 309)]
        cached, output, why = ask(driver, turn, text)
        assert len(before) - 1 - cached <= PAGE, "the last token has not been computed before"
        assert why in ("no_pages", "no_snapshot"), "the latter where a page has ended with the answer"
    stats = driver.scheduler.stats().snapshots
    assert stats is not None
    assert stats.num_loaded == 2
    assert sum(stats.misses.values()) == 3


def test_a_text_that_is_cached_whole_is_no_miss() -> None:
    driver = driver_of(8)
    ask(driver, "first", list(range(9)))
    assert ask(driver, "again", list(range(9)))[::2] == (8, "")


def test_the_third_that_shares_a_beginning_starts_there() -> None:
    """The second one finds out where they part."""
    driver = driver_of(8)
    system = list(range(17))
    told = [ask(driver, f"r{i}", [*system, *range(1000 - 20 * i, 990 - 20 * i, -1)]) for i in range(1, 4)]
    assert [(cached, why) for cached, _, why in told] == [(0, "no_pages"), (0, "no_snapshot"), (16, "no_pages")]


def test_the_least_recently_used_makes_room() -> None:
    driver = driver_of(2)
    for name, start in (("a", 0), ("b", 100), ("c", 200)):
        ask(driver, name, list(range(start, start + 9)), max_tokens=1)
    assert ask(driver, "b again", list(range(100, 109)), max_tokens=1)[::2] == (8, "")
    assert ask(driver, "a again", list(range(9)), max_tokens=1)[::2] == (0, "snapshot_evicted")
    assert driver.scheduler.snapshot_totals.num_evicted == 2
    assert ask(driver, "c again", list(range(200, 209)), max_tokens=1)[::2] == (0, "snapshot_evicted")


def test_a_row_keeps_its_latest() -> None:
    driver = driver_of(8)
    ask(driver, "long", list(range(9)), max_tokens=60)
    stats = driver.scheduler.stats().snapshots
    assert stats is not None
    assert stats.num_saved > 10
    assert stats.num_used == 2, "at the end of the prompt, and of the answer"


def test_a_row_s_latest_stays_once_another_request_has_started_from_it() -> None:
    """Usually the next one of the row replaces it."""
    driver = driver_of(8)
    prompt = list(range(9))
    driver.add(make_request("long", prompt, 60))
    while len(driver.outputs.get(("long", 0), ())) < 3 * PAGE:
        driver.step()
    shared = [*prompt, *driver.outputs["long", 0][: 3 * PAGE]]
    cached, _, _ = ask_beside(driver, "turn", [*shared, 900, 901])
    assert cached > len(prompt), "it starts from a snapshot of the row"
    while len(driver.outputs["long", 0]) < 9 * PAGE:
        driver.step()
    assert ("long", 0) not in driver.finished
    assert ask_beside(driver, "other turn", [*shared, 800, 801])[0] >= cached


def ask_beside(driver: Driver, name: str, prompt: list[int]) -> tuple[int, list[int], str]:
    """Like `ask`, while others go on."""
    driver.add(make_request(name, prompt, 1))
    while (name, 0) not in driver.finished:
        driver.step()
    return driver.num_cached[name, 0], driver.outputs[name, 0], driver.bills[name, 0].cache_miss


def test_several_answers_share_a_prompt() -> None:
    driver = driver_of(8)
    driver.add(make_request("r", range(22), 6, n=4))
    driver.run()
    assert [driver.num_cached["r", i] for i in range(4)] == [0, 20, 20, 20]


def test_without_places_nothing_is_shared() -> None:
    driver = driver_of(0)
    ask(driver, "first", list(range(9)))
    assert ask(driver, "again", list(range(9)))[::2] == (0, "")
    assert driver.scheduler.stats().snapshots is None


def test_what_is_dropped_frees_its_places() -> None:
    driver = driver_of(8)
    ask(driver, "first", list(range(30)))
    driver.scheduler.reset_prefix_cache()
    stats = driver.scheduler.stats().snapshots
    assert stats is not None
    assert stats.num_used == 0
    assert ask(driver, "again", list(range(30)))[::2] == (0, "no_pages")
