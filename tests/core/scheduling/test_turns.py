"""Rows go to tenants, and of a tenant to its groups, in turns: nobody keeps others from a first token."""

from random import Random

import pytest

from penstock.ipc.messages import AddRequest
from tests.core.driver import Driver, make_limits, make_request


def request(name: str, *, tenant: str = "", group: str = "", n: int = 1, priority: int = 0) -> AddRequest:
    return make_request(name, range(5), 3, n=n, tenant=tenant, group=group, priority=priority)


def admitted(driver: Driver) -> list[str]:
    """Requests in the order in which their sequences got rows."""
    return [each.request_id for step in driver.steps if step.record for each in step.record.admitted]


def test_single_sequences_go_in_the_order_in_which_they_came() -> None:
    driver = Driver(make_limits(max_num_seqs=1))
    for i in range(30):
        driver.add(request(f"{i}"))
    driver.run()
    assert admitted(driver) == [f"{i}" for i in range(30)]


def test_a_request_of_many_sequences_has_one_turn_at_a_time() -> None:
    driver = Driver(make_limits(max_num_seqs=1))
    for prompt in range(4):  # one client, four prompts
        driver.add(request(f"heavy-{prompt}", group="heavy", n=50))
    for _ in range(4):
        driver.step()
    before = len(admitted(driver))
    driver.add(request("light"))
    driver.add(request("pair", n=2))
    driver.run()
    after = admitted(driver)[before:]
    assert after.index("light") <= 1
    assert [i for i, name in enumerate(after) if name == "pair"][1] <= 6
    assert [name.startswith("heavy") for name in after].count(True) == 200 - before


def test_prompts_of_one_group_have_turns_too() -> None:
    driver = Driver(make_limits(max_num_seqs=1))
    for prompt in range(3):
        driver.add(request(f"{prompt}", group="g", n=2))
    driver.run()
    assert admitted(driver) == ["0", "1", "2", "0", "1", "2"]


def test_a_tenant_s_requests_do_not_hold_up_another_tenant() -> None:
    driver = Driver(make_limits(max_num_seqs=1))
    for i in range(50):
        driver.add(request(f"a{i}", tenant="a"))
    driver.step()
    for i in range(3):
        driver.add(request(f"b{i}", tenant="b"))
    driver.run()
    assert admitted(driver)[:8] == ["a0", "a1", "b0", "a2", "b1", "a3", "b2", "a4"]


def test_a_lower_level_goes_first_whoever_has_the_turn() -> None:
    driver = Driver(make_limits(max_num_seqs=1), scheduling_policy="priority", pipeline_depth=0)
    driver.add(request("runs"))
    driver.step()
    for i in range(3):
        driver.add(request(f"low{i}", tenant="a", priority=1))
    driver.add(request("high", tenant="b", n=3))
    driver.run()
    assert admitted(driver)[1:] == ["high", "high", "high", "low0", "low1", "low2"]


def test_who_had_a_row_comes_before_who_had_none() -> None:
    driver = Driver(make_limits(max_num_seqs=2))
    for i in range(6):
        driver.add(make_request(f"{i}", range(5), 20, tenant=f"t{i}"))
    driver.step()
    driver.reset_worker(has_died=False)
    num_before = len(admitted(driver))
    driver.run()
    assert admitted(driver)[num_before:] == ["0", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize("seed", range(20))
def test_no_turn_is_further_off_than_the_others_that_wait(seed: int) -> None:
    """However many sequences others have, and whatever they add meanwhile."""
    rng = Random(seed)
    driver = Driver(make_limits(max_num_seqs=1), pipeline_depth=rng.choice([0, 1]))
    tenants = [f"t{i}" for i in range(rng.randint(1, 4))]
    for i in range(20):
        driver.add(request(f"r{i}", tenant=rng.choice(tenants), n=rng.randint(1, 30)))
    driver.step()
    counts = {each.tenant: each for each in driver.scheduler.waiting.tenants()}
    tenant = rng.choice(tenants)
    own = counts[tenant].num_groups if tenant in counts else 0
    num_ahead = own + sum(min(each.num_seqs, own + 1) for name, each in counts.items() if name != tenant)
    before = len(admitted(driver))
    driver.add(request("light", tenant=tenant))
    for i in range(1000):
        if "light" in admitted(driver):
            break
        driver.add(request(f"later{i}", tenant=rng.choice(tenants), n=rng.randint(1, 5)))
        driver.step()
    # A group that waits for the prompt of its first sequence comes back to the end of the line.
    assert admitted(driver)[before:].index("light") <= num_ahead


def test_a_queue_that_is_too_long_refuses_whoever_would_wait_and_nobody_else() -> None:
    driver = Driver(make_limits(max_num_seqs=1))
    driver.add(request("heavy", tenant="a", n=100))
    driver.step()
    driver.scheduler.queue_bound.max_turns = 3
    for i in range(2):
        assert driver.add(request(f"a{i}", tenant="a")) is None
    refused = driver.add(request("a2", tenant="a"))
    assert refused is not None
    assert refused.code == "queue_full"
    assert "3 others would have their turn before; at most 3 may" in refused.reason
    assert driver.add(request("a3", tenant="a", group="heavy")) is None, (
        "some of what was asked for at once waits already"
    )
    assert driver.add(request("b", tenant="b")) is None
    driver.run()


def test_a_full_queue_does_not_shut_out_who_has_nothing_in_it() -> None:
    driver = Driver(make_limits(max_num_seqs=1), max_num_queued_seqs=10)
    driver.add(request("a", tenant="a", n=10))
    assert driver.add(request("a1", tenant="a")) is not None
    assert driver.add(request("b", tenant="b")) is None
    assert driver.add(request("b1", tenant="b")) is not None
    assert driver.add(request("c", tenant="c", n=10)) is not None, "nor is there no end to it"
    assert driver.add(request("c", tenant="c", n=9)) is None
    driver.run()


def test_who_ran_when_a_worker_died_shuts_nobody_out() -> None:
    """They wait again, and that is no sign of a long queue."""
    driver = Driver(make_limits(max_num_seqs=4))
    driver.scheduler.queue_bound.max_turns = 2
    for i in range(4):
        driver.add(make_request(f"r{i}", range(5), 20))
        driver.schedule()
        driver.execute()
        driver.process()
    driver.reset_worker()
    assert driver.scheduler.stats().num_waiting == 4
    driver.add(make_request("newcomer", range(5), 3))  # fails if it is refused
    driver.run()
    assert len(driver.outputs["newcomer", 0]) == 3
    assert driver.scheduler.stats().max_turns == 2
