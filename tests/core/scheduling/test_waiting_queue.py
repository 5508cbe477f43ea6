"""The waiting queue stays ordered and bounded under aborts."""

from random import Random

from tests.core.driver import Driver, make_limits, make_request


def test_aborted_requests_leave_nothing_behind_a_blocked_head() -> None:
    driver = Driver(make_limits(max_num_seqs=1), max_num_queued_seqs=50)
    driver.add(make_request("runs", range(5), 100))
    driver.step()
    driver.add(make_request("head", range(5)))
    for i in range(2000):
        assert driver.scheduler.add_request(make_request(f"r{i}", range(5)), b"x") is None
        driver.scheduler.abort(f"r{i}")
    assert driver.scheduler.waiting.num_seqs == 1
    assert driver.scheduler.waiting.num_entries < 100


def test_order_is_kept_through_random_aborts() -> None:
    rng = Random(0)
    driver = Driver(make_limits(max_num_seqs=1), scheduling_policy="priority")
    priorities = {f"r{i}": rng.randint(0, 5) for i in range(200)}
    for name, priority in priorities.items():
        driver.add(make_request(name, range(3), 1, priority=priority))
    for name in rng.sample(sorted(priorities), 120):
        driver.abort(name)
        del priorities[name]
    driver.run()
    assert [name for name, _ in driver.finished] == sorted(priorities, key=lambda name: priorities[name])
