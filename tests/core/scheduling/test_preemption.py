"""Out of pages: eviction first, then preemption, of the right sequence, without taking turns."""

import pytest

from tests.core.driver import Driver, make_limits, make_request
from tests.core.fake_worker import solo_run


def preempted(driver: Driver) -> list[tuple[str, int]]:
    return [(p.request_id, p.sequence_idx) for step in driver.steps if step.record for p in step.record.preempted]


def check_solo_outputs(driver: Driver, prompts: dict[str, list[int]], max_tokens: int) -> None:
    for name, prompt in prompts.items():
        request = make_request(name, prompt, max_tokens)
        assert driver.outputs[name, 0] == solo_run(prompt, request.sampling, 0, driver.limits)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_the_latest_is_preempted_and_finishes_as_if_nothing_had_happened(depth: int, caching: bool) -> None:
    limits = make_limits(num_pages=7, page_size=4, max_model_len=24)
    driver = Driver(limits, pipeline_depth=depth, enable_prefix_caching=caching)
    prompts = {"a": list(range(8)), "b": list(range(100, 108)), "c": list(range(200, 208))}
    for name, prompt in prompts.items():
        driver.add(make_request(name, prompt, 14))
    driver.run()
    assert preempted(driver)[0] == ("c", 0)
    assert ("a", 0) not in preempted(driver)
    assert [name for name, _ in driver.finished] == ["a", "b", "c"]
    check_solo_outputs(driver, prompts, 14)


def test_the_lowest_priority_is_preempted_first() -> None:
    limits = make_limits(num_pages=7, page_size=4, max_model_len=24)
    driver = Driver(limits, scheduling_policy="priority")
    for name, priority in (("low", 9), ("high", -1), ("middle", 3)):
        driver.add(make_request(name, [priority % 7] * 8, 14, priority=priority))
    driver.run()
    assert preempted(driver)[0] == ("low", 0)
    assert ("high", 0) not in preempted(driver)


def test_cold_cache_pages_go_before_anybody_is_preempted() -> None:
    driver = Driver(make_limits(num_pages=8, page_size=4, max_model_len=32))
    driver.add(make_request("old", range(300, 316), 1))
    driver.run()
    assert driver.scheduler.stats().num_cached_pages == 4
    driver.add(make_request("a", range(8), 20))
    driver.run()
    assert preempted(driver) == []
    assert driver.num_cached["a", 0] == 0


def test_nobody_is_preempted_for_pages_that_come_back_with_the_results_in_flight() -> None:
    limits = make_limits(num_pages=4, page_size=4, max_model_len=16)
    driver = Driver(limits, pipeline_depth=2, enable_prefix_caching=False)
    driver.add(make_request("ends", range(7), 2))
    driver.add(make_request("stays", range(100, 106), 6))
    driver.run()
    assert preempted(driver) == []
    batches = [[name for name, _, _ in step.record.rows] for step in driver.steps if step.record]
    assert batches == [["ends", "stays"], ["ends", "stays"], *[["stays"]] * 4]
    check_solo_outputs(driver, {"stays": list(range(100, 106))}, 6)


def test_a_preempted_sequence_waits_until_somebody_has_left() -> None:
    """Many that do not fit together must not take turns: each is preempted a few times at most."""
    driver = Driver(make_limits(num_pages=32, page_size=4, max_num_seqs=12, max_model_len=80), pipeline_depth=1)
    prompts = {f"r{i}": list(range(i, i + 20)) for i in range(12)}
    for name, prompt in prompts.items():
        driver.add(make_request(name, prompt, 60))
    driver.run()
    counts = [preempted(driver).count((name, 0)) for name in prompts]
    assert 0 < max(counts) <= 4
    assert sum(counts) <= 2 * len(prompts)
    check_solo_outputs(driver, prompts, 60)


def test_a_preempted_sequence_finds_its_surviving_pages_in_the_cache() -> None:
    limits = make_limits(num_pages=9, page_size=4, max_model_len=36)
    driver = Driver(limits, pipeline_depth=0)
    driver.add(make_request("a", range(8), 10))
    driver.add(make_request("b", range(100, 108), 20))
    driver.run()
    assert preempted(driver) == [("b", 0)]
    back = [a for step in driver.steps if step.record for a in step.record.admitted if a.request_id == "b"][1]
    assert back.num_reused_tokens >= 8
    assert driver.num_cached["b", 0] == 0, "only the first admission counts"


def test_results_of_an_epoch_before_a_preemption_are_dropped() -> None:
    """A prefill chunk is in flight when its sequence is preempted, and still when it runs again."""
    limits = make_limits(num_pages=6, page_size=4, max_num_batched_tokens=6, max_model_len=24)
    driver = Driver(limits, pipeline_depth=2, enable_prefix_caching=False)
    driver.add(make_request("a", range(3), 20))
    driver.add(make_request("b", range(100, 117), 2))
    for _ in range(3):  # chunks of b in the first two; in the third, a needs a page of b's
        assert driver.schedule() is not None
    assert preempted(driver) == [("b", 0)]
    driver.abort("a")
    driver.execute()
    driver.process()
    assert driver.schedule() is not None
    (seq,) = driver.scheduler.running
    epochs = [chunk.epoch for step in driver.scheduler.in_flight for chunk in step.chunks if chunk.seq is seq]
    assert epochs == [1, 2]
    driver.execute()
    driver.process()
    assert seq.num_settled_tokens == 0
    driver.run()
    request = make_request("b", range(100, 117), 2)
    assert driver.outputs["b", 0] == solo_run(list(range(100, 117)), request.sampling, 0, limits)


def test_tokens_sampled_before_a_preemption_are_dropped() -> None:
    """As above, for a decode: the late token is that of the old epoch, though the sequence runs again."""
    limits = make_limits(num_pages=4, page_size=4, max_model_len=16)
    driver = Driver(limits, pipeline_depth=2, enable_prefix_caching=False)
    driver.add(make_request("a", range(6), 10))
    driver.add(make_request("b", range(100, 106), 6))
    for _ in range(3):  # the prompts; positions 6; positions 7
        assert driver.schedule() is not None
    driver.execute()
    driver.process()
    assert driver.schedule() is not None  # position 8: a takes a page of b's
    assert preempted(driver) == [("b", 0)]
    driver.abort("a")
    driver.execute()
    driver.process()
    assert len(driver.outputs["b", 0]) == 1, "its second token was dropped"
    assert driver.schedule() is not None  # b again, while its third token is in flight
    while driver.scheduler.running.decodes or driver.scheduler.running.prefills:
        driver.execute()
        driver.process()
        driver.schedule()
    driver.run()
    assert driver.scheduler.totals.num_dropped_tokens == 2 + 3  # of b, and of a
    request = make_request("b", range(100, 106), 6)
    assert driver.outputs["b", 0] == solo_run(list(range(100, 106)), request.sampling, 0, limits)


def test_alone_beside_its_own_duplicates_a_sequence_still_gets_through() -> None:
    """The tree has another's copies of its pages: it must not keep those and starve for pages of its own."""
    limits = make_limits(num_pages=6, page_size=4, max_model_len=24)
    driver = Driver(limits, pipeline_depth=0)
    driver.add(make_request("a", range(8), 12))
    driver.add(make_request("b", range(8), 16))
    driver.step()
    assert driver.scheduler.stats().num_used_pages == 4, "both computed the same prompt"
    driver.abort("a")
    driver.run()
    assert preempted(driver) == [("b", 0)]
    request = make_request("b", range(8), 16)
    assert driver.outputs["b", 0] == solo_run(list(range(8)), request.sampling, 0, limits)
