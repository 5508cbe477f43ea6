"""A request whose client does not read holds no row and no page, is not counted as waiting, and loses no token."""

import random

import pytest

from penstock.parts.policies.scheduler.registry import POLICIES
from tests.core.driver import Driver, make_limits, make_request


def settle(driver: Driver) -> None:
    """Let all that may run come to its end; paused requests are left."""
    while driver.schedule() is not None or driver.plans or driver.results:
        if driver.plans:
            driver.execute()
        if driver.results:
            driver.process()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_it_holds_nothing_and_goes_on_with_the_next_token(depth: int, enable_prefix_caching: bool) -> None:
    oracle = Driver(pipeline_depth=depth, enable_prefix_caching=enable_prefix_caching)
    driver = Driver(pipeline_depth=depth, enable_prefix_caching=enable_prefix_caching)
    for each in (oracle, driver):
        each.add(make_request("a", range(10), 40, n=2, seed=5))
        each.add(make_request("b", range(3, 12), 40))
    oracle.run()
    for _ in range(12):
        driver.step()
    driver.scheduler.pause("a")
    driver.scheduler.pause("a")
    told = {name: len(tokens) for name, tokens in driver.outputs.items() if name[0] == "a"}
    settle(driver)
    assert ("b", 0) in driver.finished
    assert {name: len(tokens) for name, tokens in driver.outputs.items() if name[0] == "a"} == told
    stats = driver.scheduler.stats()
    assert stats.num_used_pages == stats.num_running == stats.num_waiting == stats.num_waiting_tokens == 0
    assert stats.num_paused == 1
    assert stats.num_preemptions == 0
    driver.scheduler.resume("a")
    driver.scheduler.resume("a")
    driver.run()
    assert driver.outputs == oracle.outputs
    assert enable_prefix_caching == (driver.scheduler.kv.cache is not None)


def test_a_paused_request_leaves_the_queue_to_others() -> None:
    driver = Driver(make_limits(max_num_seqs=1), max_num_queued_seqs=2)
    driver.add(make_request("a", range(5), 30))
    driver.step()
    for name in "bc":
        assert driver.add(make_request(name, range(5), 30)) is None
    assert driver.add(make_request("d", range(5), 30)) is not None
    driver.scheduler.pause("b")  # while it waits
    assert driver.add(make_request("d", range(5), 30)) is None
    driver.scheduler.pause("a")
    settle(driver)
    assert {name for name, _ in driver.finished} == {"c", "d"}
    driver.abort("a")
    driver.scheduler.resume("a")
    assert driver.scheduler.stats().num_paused == 1
    driver.scheduler.resume("b")
    driver.run()
    assert ("b", 0) in driver.finished


def test_a_paused_suspect_does_not_hold_up_the_others() -> None:
    driver = Driver()
    for name in "ab":
        driver.add(make_request(name, range(5), 20))
    for _ in range(3):
        driver.step()
    driver.reset_worker()  # both were in flight
    driver.scheduler.pause("a")
    settle(driver)
    assert ("b", 0) in driver.finished
    driver.scheduler.resume("a")
    driver.run()


def test_a_worker_that_dies_leaves_the_paused_paused() -> None:
    driver = Driver()
    oracle = Driver()
    for each in (driver, oracle):
        each.add(make_request("a", range(9), 20))
    oracle.run()
    for _ in range(5):
        driver.step()
    driver.scheduler.pause("a")
    driver.reset_worker()
    settle(driver)
    assert driver.scheduler.stats().num_paused == 1
    driver.scheduler.resume("a")
    driver.run()
    assert driver.outputs == oracle.outputs


@pytest.mark.parametrize("seed", range(14))
def test_pauses_at_any_moment_change_no_token(seed: int) -> None:
    rng = random.Random(seed)
    limits = make_limits(num_pages=24, max_num_seqs=6, max_num_batched_tokens=16)
    policy = list(POLICIES)[seed % len(POLICIES)]
    oracle = Driver(limits, pipeline_depth=seed % 3, scheduling_policy=policy)
    driver = Driver(limits, pipeline_depth=seed % 3, scheduling_policy=policy)
    names = []
    for i in range(40):
        prompt = [rng.randrange(30) for _ in range(rng.randrange(1, 30))]
        n, length, priority = rng.choice((1, 1, 2)), rng.randrange(1, 30), rng.randrange(3)
        names.append(f"{i}")
        for each in (oracle, driver):
            each.add(make_request(f"{i}", prompt, length, n=n, seed=i, priority=priority, tenant="abc"[priority]))
    oracle.run()
    for _ in range(150):
        for _ in range(rng.randrange(3)):
            driver.scheduler.pause(rng.choice(names))
        if rng.random() < 0.7:
            driver.scheduler.resume(rng.choice(names))
        if rng.random() < 0.02:
            driver.abort(rng.choice(names))
        if rng.random() < 0.02:
            driver.reset_worker()
        driver.now += 0.5
        driver.schedule()
        if driver.plans and rng.random() < 0.8:
            driver.execute()
        if driver.results and rng.random() < 0.8:
            driver.process()
    for name in names:
        driver.scheduler.resume(name)
    driver.run()
    for sequence, tokens in driver.outputs.items():
        if sequence not in driver.aborted and driver.finished[sequence].error_code != "ends_workers":
            assert tokens == oracle.outputs[sequence]
