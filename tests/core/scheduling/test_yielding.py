"""Rows are taken back for those that come first by priority, and for those whom somebody's many rows keep out."""

from collections import Counter
from random import Random

import pytest

from tests.core.driver import Driver, make_limits, make_request
from tests.core.fake_worker import solo_run
from tests.core.scheduling.test_preemption import preempted
from tests.faults.soak import sized

PROMPT = list(range(8))


def steps_until(driver: Driver, name: str, limit: int = 1000) -> int:
    """Steps until a request has its first token."""
    for num in range(limit):
        if (name, 0) in driver.outputs:
            return num
        driver.step()
    raise AssertionError(f"{name} has no token after {limit} steps")


def check_outputs(driver: Driver) -> None:
    for (name, idx), output in driver.outputs.items():
        request, _ = driver.added[name]
        prompt = list(memoryview(request.prompt_token_ids).cast("i"))
        assert output == solo_run(prompt, request.sampling, idx, driver.limits), name


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_a_higher_priority_takes_the_row_of_the_lowest(depth: int, caching: bool) -> None:
    driver = Driver(
        make_limits(max_num_seqs=4, max_model_len=256, num_pages=512),
        scheduling_policy="priority",
        pipeline_depth=depth,
        enable_prefix_caching=caching,
    )
    for i in range(4):
        driver.add(make_request(f"low{i}", [i, *PROMPT], 200, priority=5 + i))
    for _ in range(20):
        driver.step()
    driver.add(make_request("high", [99, *PROMPT], 20, priority=-1))
    assert steps_until(driver, "high") <= depth + 2
    assert preempted(driver) == [("low3", 0)]
    driver.add(make_request("middle", [98, *PROMPT], 20, priority=6))  # as low1: only low2 stands behind it
    assert steps_until(driver, "middle") <= depth + 2
    assert preempted(driver) == [("low3", 0), ("low2", 0)]
    driver.run()
    assert [name for name, _ in driver.finished][:2] == ["high", "middle"]
    assert len(preempted(driver)) == 2, "nobody takes turns"
    check_outputs(driver)


def test_a_higher_priority_takes_pages_too() -> None:
    driver = Driver(
        make_limits(num_pages=32, page_size=4, max_num_seqs=8, max_model_len=128), scheduling_policy="priority"
    )
    for i in range(3):
        driver.add(make_request(f"low{i}", [i] * 30, 20, priority=1))
    for _ in range(3):
        driver.step()
    driver.add(make_request("high", [9] * 60, 20))
    assert steps_until(driver, "high") <= 3
    assert ("low2", 0) in preempted(driver)
    driver.run()
    assert list(driver.finished).index(("high", 0)) <= 1
    assert max(Counter(preempted(driver)).values()) <= 3
    check_outputs(driver)


def test_equal_priorities_take_nothing_from_each_other() -> None:
    driver = Driver(make_limits(max_num_seqs=2), scheduling_policy="priority")
    for i in range(6):
        driver.add(make_request(f"{i}", [i, *PROMPT], 30, priority=3))
    driver.run()
    assert preempted(driver) == []


def test_first_come_first_served_knows_no_priority() -> None:
    driver = Driver(make_limits(max_num_seqs=2))
    for i in range(6):
        driver.add(make_request(f"{i}", [i, *PROMPT], 30, priority=-i))
    driver.run()
    assert preempted(driver) == []


@pytest.mark.parametrize("own_tenant", [True, False])
def test_whoever_has_no_row_gets_one_from_whoever_has_all(own_tenant: bool) -> None:
    driver = Driver(make_limits(max_num_seqs=8, max_model_len=512, num_pages=2048))
    driver.add(make_request("heavy", PROMPT, 200, n=24, tenant="a"))
    for _ in range(30):
        driver.step()
    assert len(driver.scheduler.running) == 8
    for i in range(20):
        driver.add(make_request(f"light{i}", [i, *PROMPT], 5, tenant="b" if own_tenant else "a"))
        assert steps_until(driver, f"light{i}") <= 3
        while (f"light{i}", 0) not in driver.finished:
            driver.step()
    assert len(preempted(driver)) <= 20
    driver.run()
    check_outputs(driver)


def test_many_small_requests_do_not_preempt_each_other() -> None:
    driver = Driver(make_limits(max_num_seqs=8))
    for i in range(60):
        driver.add(make_request(f"{i}", [i, *PROMPT], 12, tenant=f"t{i % 3}"))
    driver.run()
    assert preempted(driver) == []


def test_all_of_a_large_request_get_on_beside_newcomers() -> None:
    """Each newcomer takes a row from it: not always from the same sequence, and never from one that has just begun."""
    driver = Driver(make_limits(max_num_seqs=4, max_model_len=128, num_pages=256))
    driver.add(make_request("heavy", PROMPT, 60, n=8))
    num_lights = 0
    for step in range(2000):
        if step % 3 == 0 and driver.scheduler.waiting.num_seqs < 20:
            driver.add(make_request(f"light{num_lights}", [num_lights, *PROMPT], 4))
            num_lights += 1
        driver.step()
        if sum(name == "heavy" for name, _ in driver.finished) == 8:
            break
    assert sum(name == "heavy" for name, _ in driver.finished) == 8
    assert len(preempted(driver)) <= num_lights
    driver.run()
    check_outputs(driver)


@pytest.mark.parametrize("seed", range(sized(6, 24)))
def test_random_loads_of_all_priorities_end_and_change_no_token(seed: int) -> None:
    rng = Random(seed)
    driver = Driver(
        make_limits(
            num_pages=rng.choice([40, 200]),
            max_num_seqs=rng.choice([2, 4, 8]),
            max_num_batched_tokens=rng.choice([9, 64]),
        ),
        scheduling_policy=rng.choice(["fcfs", "priority", "priority"]),
        pipeline_depth=rng.choice([0, 1, 2]),
        enable_prefix_caching=rng.random() < 0.7,
    )
    num_requests = 40
    for i in range(num_requests):
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 40))]
        driver.add(
            make_request(
                f"{i}",
                prompt,
                rng.randint(1, 60),
                n=rng.choice([1, 1, 1, 3, 12]),
                seed=i,
                priority=rng.randrange(4),
                tenant=rng.choice("aab"),
            )
        )
        for _ in range(rng.randrange(6)):
            if driver.scheduler.has_work:
                driver.step()
    driver.run()
    check_outputs(driver)
    for step in driver.steps:
        record = step.record
        assert record is not None
        again = {(each.request_id, each.sequence_idx) for each in record.admitted}
        assert not again & {(each.request_id, each.sequence_idx) for each in record.preempted}, "to no end"
