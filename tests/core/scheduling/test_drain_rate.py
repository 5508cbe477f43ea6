"""How fast the queue empties, measured only while there is one; and the queue's bounds in sequences and tokens."""

import pytest

from penstock.core.sequences.drain_rate import WINDOW_SECONDS, DrainRate
from tests.core.driver import Driver, make_limits, make_request


def test_the_rate_is_what_left_while_somebody_waited() -> None:
    drain = DrainRate()
    drain.note(100.0, 0, 50, 5000)
    assert drain.seqs_per_second == drain.tokens_per_second == 0
    drain.note(101.0, 9, 50, 5000)
    assert drain.seqs_per_second == 0, "it is too early to say"
    drain.note(103.0, 5, 54, 5400)
    assert drain.seqs_per_second == pytest.approx(2)
    assert drain.tokens_per_second == pytest.approx(200)
    drain.note(105.0, 0, 62, 6200)
    assert drain.seqs_per_second == pytest.approx(3)
    for second in range(106, 200):  # nobody waits, and few come: they get a row at once
        drain.note(second, 0, second, second)
    assert drain.seqs_per_second == pytest.approx(3), "idle times say nothing"
    drain.note(200.0, 4, 262, 6200)
    drain.note(200.2, 4, 263, 6200)
    drain.note(200.4, 0, 264, 6200)
    assert drain.seqs_per_second == pytest.approx(3), "a burst says only how fast it is at least"
    drain.note(201.0, 4, 264, 6200)
    drain.note(203.0, 4, 264, 6200)
    assert drain.seqs_per_second == 0, "it is stuck"


def test_as_many_may_wait_as_leave_within_the_time() -> None:
    drain = DrainRate()
    drain.note(100.0, 9, 0, 0)
    assert drain.turns_within(5.0, 16) == 64, "nothing is known yet: four times the rows"
    drain.note(100.5, 9, 1, 1)
    assert drain.turns_within(5.0, 16) == 64, "nor is it after so short a time"
    drain.note(101.0, 9, 20, 20)
    assert drain.turns_within(5.0, 16) == 100
    assert drain.turns_within(5.0, 200) == 200, "as many as there are rows in any case"
    for second in range(102, 120):
        drain.note(second, 9, 20, 20)
    assert drain.turns_within(5.0, 16) == 16, "it is stuck"


def test_the_rate_forgets_what_is_long_past() -> None:
    drain = DrainRate()
    for tick in range(1000):  # 10 a second, then 1 a second
        num = tick if tick < 500 else 500 + (tick - 500) // 10
        drain.note(tick / 10, 3, num, num)
    assert drain.seqs_per_second == pytest.approx(1, rel=2 / WINDOW_SECONDS)


def test_the_queue_is_bounded_by_tokens_but_takes_anybody_when_it_is_empty() -> None:
    driver = Driver(make_limits(max_model_len=100), max_num_queued_tokens=60)
    assert driver.add(make_request("a", range(70))) is None, "nobody waits"
    full = driver.add(make_request("b", range(2)))
    assert full is not None
    assert full.code == "queue_full"
    assert "70" in full.reason
    assert "60" in full.reason
    driver.step()
    assert driver.scheduler.stats().num_waiting_tokens == 0, "it runs"
    assert driver.add(make_request("c", range(20), n=3)) is None
    assert driver.scheduler.stats().num_waiting_tokens == 60
    assert driver.add(make_request("d", [1])) is not None
    driver.run()
    assert driver.scheduler.totals.num_admitted == 4
