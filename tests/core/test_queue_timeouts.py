"""Requests that wait too long are ended; those that had a row once are not, whatever happened to them since."""

from penstock.core.engine.queue_timeouts import QueueTimeouts
from tests.core.driver import OWNER, Driver, make_limits, make_request


def test_those_who_never_had_a_row_end_in_time() -> None:
    driver = Driver(make_limits(max_num_seqs=1))
    timeouts = QueueTimeouts(5.0)
    for i, n in enumerate((2, 2, 1)):
        driver.add(make_request(f"{i}", [1, 2, 3], 20, n=n))
        timeouts.note(10.0 + i, f"{i}")
    driver.step()
    assert timeouts.expire(14.9, driver.scheduler) == {}
    assert timeouts.expire(15.5, driver.scheduler) == {}, "it runs"
    expired = timeouts.expire(16.5, driver.scheduler)
    driver.take(expired)
    assert [(d.request_id, d.sequence_idx, d.error_code) for d in expired[OWNER]] == [
        ("1", 0, "queue_timeout"),
        ("1", 1, "queue_timeout"),
    ]
    assert "5 s" in expired[OWNER][0].error
    driver.run()
    assert driver.finished["2", 0].finish_reason == "length"
    assert timeouts.expire(100.0, driver.scheduler) == {}


def test_who_lost_his_row_is_not_ended() -> None:
    driver = Driver(make_limits(max_num_seqs=1))
    timeouts = QueueTimeouts(5.0)
    driver.add(make_request("a", [1, 2, 3], 20))
    timeouts.note(10.0, "a")
    driver.step()
    driver.reset_worker()
    assert driver.scheduler.waiting.num_seqs == 1
    assert timeouts.expire(100.0, driver.scheduler) == {}
    driver.run()
    assert len(driver.outputs["a", 0]) == 20


def test_without_a_limit_nothing_is_kept() -> None:
    driver = Driver(make_limits(max_num_seqs=1))
    timeouts = QueueTimeouts(0.0)
    driver.add(make_request("a", [1], 4))
    timeouts.note(0.0, "a")
    assert timeouts.expire(1e9, driver.scheduler) == {}
    driver.run()
