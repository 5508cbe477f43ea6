"""However a request ends, nothing of it stays in the scheduler."""

import gc
from collections import Counter

from penstock.core.scheduling.results import MAX_STEPS_AHEAD
from penstock.core.sequences.sequence import Request, Sequence
from tests.core.driver import Driver, make_limits, make_request


def survivors() -> Counter[str]:
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing) in (Request, Sequence))


def test_nothing_of_a_request_stays() -> None:
    before = survivors()
    driver = Driver(make_limits(num_pages=200, max_model_len=MAX_STEPS_AHEAD + 50))
    for i in range(60):
        driver.add(make_request(f"r{i}", range(5 + i % 7), 12, n=1 + i % 2, stop=tuple(range(100))))
    for i in range(0, 60, 3):
        driver.step()
        driver.abort(f"r{i}")
    driver.reset_worker()
    driver.run()
    # What the calendar has of sequences that have ended goes with the steps that they were to be looked at after.
    driver.add(make_request("last", range(5), MAX_STEPS_AHEAD + 20))
    driver.run()
    driver.steps.clear()
    now = survivors() - before
    assert now.total() <= 2, now  # the last one may be looked at yet
