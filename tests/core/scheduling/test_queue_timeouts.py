"""Requests that wait too long are ended; those that had a row once are not, whatever happened to them since."""

from tests.core.driver import OWNER, Driver, make_limits, make_request


def test_those_who_never_had_a_row_end_in_time() -> None:
    driver = Driver(make_limits(max_num_seqs=1), queue_timeout=5.0)
    for i, n in enumerate((2, 2, 1)):
        driver.now = 10.0 + i
        driver.add(make_request(f"{i}", [1, 2, 3], 20, n=n))
    driver.step()
    assert driver.scheduler.expire_queued(14.9) == {}
    assert driver.scheduler.expire_queued(15.5) == {}, "it runs"
    expired = driver.scheduler.expire_queued(16.5)
    driver.take(expired)
    assert [(d.request_id, d.sequence_idx, d.error_code) for d in expired[OWNER]] == [
        ("1", 0, "queue_timeout"),
        ("1", 1, "queue_timeout"),
    ]
    assert "5 s" in expired[OWNER][0].error
    driver.run()
    assert driver.finished["2", 0].finish_reason == "length"
    assert driver.scheduler.expire_queued(100.0) == {}


def test_who_lost_his_row_is_not_ended() -> None:
    driver = Driver(make_limits(max_num_seqs=1), queue_timeout=5.0)
    driver.now = 10.0
    driver.add(make_request("a", [1, 2, 3], 20))
    driver.step()
    driver.reset_worker()
    assert driver.scheduler.waiting.num_seqs == 1
    assert driver.scheduler.expire_queued(100.0) == {}
    driver.restart_scheduler()
    assert driver.scheduler.expire_queued(200.0) == {}, "it waited under another scheduler, too"
    driver.run()
    assert len(driver.outputs["a", 0]) == 20


def test_without_a_limit_nobody_is_ended() -> None:
    driver = Driver(make_limits(max_num_seqs=1))
    driver.now = 1.0
    driver.add(make_request("a", [1], 4))
    assert driver.scheduler.expire_queued(1e9) == {}
    driver.run()
