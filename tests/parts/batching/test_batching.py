"""Batching kinds: who begins together, when, and what happens to a batch whose members come and go."""

from math import inf

import pytest

from penstock.ipc.messages import SamplingParams
from penstock.parts.batching.options import BatchingName
from penstock.parts.batching.scheduler.batches import FILLS, RUNS
from tests.core.driver import Driver, make_limits, make_request
from tests.core.fake_worker import solo_run
from tests.core.scheduling.test_preemption import preempted
from tests.core.scheduling.test_scheduler_traces import random_trace
from tests.parts.policies.test_policies import admitted, check_outputs

BATCHED: tuple[BatchingName, ...] = ("static", "dynamic", "length-aware")


def make_driver(kind: BatchingName, *, max_num_seqs: int = 4, num_pages: int = 256, **options: object) -> Driver:
    limits = make_limits(num_pages=num_pages, max_num_seqs=max_num_seqs)
    return Driver(limits, batching=kind, pipeline_depth=0, **options)  # type: ignore[arg-type]


def begun(driver: Driver) -> list[list[str]]:
    """The requests that got their first rows, step by step."""
    records = [step.record for step in driver.steps if step.record]
    first: set[str] = set()
    found = []
    for record in records:
        new = [each.request_id for each in record.admitted if each.request_id not in first]
        first.update(new)
        if new:
            found.append(new)
    return found


def waits_because(driver: Driver) -> set[str]:
    record = driver.steps[-1].record
    assert record is not None
    return set(record.waiting_reasons)


def test_a_static_batch_runs_until_its_longest_ends() -> None:
    driver = make_driver("static", max_num_seqs=2)
    for name, length in (("a", 3), ("b", 9), ("c", 2), ("d", 2), ("e", 2)):
        driver.add(make_request(name, range(5), length))
    driver.step()
    driver.step()
    driver.step()
    assert ("a", 0) in driver.finished
    driver.step()
    assert RUNS in waits_because(driver)
    driver.run()
    assert begun(driver) == [["a", "b"], ["c", "d"], ["e"]]
    assert len(driver.steps) == 9 + 2 + 2
    check_outputs(driver)


def test_a_static_batch_is_what_waits_and_others_wait_for_the_next() -> None:
    driver = make_driver("static", max_num_seqs=3)
    driver.add(make_request("a", range(5), 4))
    driver.step()
    for name in "bcde":
        driver.add(make_request(name, range(5), 4))
    driver.run()
    assert begun(driver) == [["a"], ["b", "c", "d"], ["e"]]


def test_a_batch_that_the_budget_of_a_step_cuts_fills_in_the_next_steps() -> None:
    """Members may come in one by one; who arrives meanwhile is not among them."""
    driver = make_driver("static", max_num_batched_tokens=16)
    for name in "abc":
        driver.add(make_request(name, [ord(name)] * 14, 6))
    driver.step()
    assert begun(driver) == [["a", "b"]]
    driver.add(make_request("late", range(5), 2))
    driver.run()
    assert [name for step in begun(driver) for name in step] == ["a", "b", "c", "late"]
    assert len(driver.steps) > 8
    assert admitted(driver)[-1] == "late"


def test_a_dynamic_batch_begins_when_it_is_full() -> None:
    driver = make_driver("dynamic", max_num_seqs=3, batch_wait_ms=50)
    for name in "ab":
        driver.add(make_request(name, range(5), 2))
        assert driver.schedule() is None
    assert driver.scheduler.stats().waiting_reasons.keys() == {"behind the first", FILLS}
    driver.add(make_request("c", range(5), 2))
    assert driver.schedule() is not None
    assert driver.now == 0.0


def test_a_dynamic_batch_begins_when_its_first_request_has_waited_long_enough() -> None:
    driver = make_driver("dynamic", batch_wait_ms=50)
    driver.now = 10.0
    driver.add(make_request("a", range(5), 2))
    assert driver.schedule() is None
    assert driver.scheduler.wakes_at == pytest.approx(10.05)
    driver.now = 10.04
    driver.add(make_request("b", range(5), 2))
    assert driver.schedule() is None
    driver.now = driver.scheduler.wakes_at
    assert driver.schedule() is not None
    assert driver.scheduler.wakes_at == inf
    driver.run()
    assert begun(driver) == [["a", "b"]]


def test_whoever_waited_while_a_batch_ran_does_not_wait_again() -> None:
    driver = make_driver("dynamic", max_num_seqs=2, batch_wait_ms=1000)
    for name in "abc":
        driver.add(make_request(name, range(5), 4))
    while ("b", 0) not in driver.finished:
        driver.now += 0.5
        driver.step()
    assert driver.scheduler.wakes_at == inf
    driver.now += 0.5
    assert driver.schedule() is not None


@pytest.mark.parametrize("kind", BATCHED)
def test_siblings_are_in_one_batch_even_if_there_are_more_than_rows(kind: BatchingName) -> None:
    driver = make_driver(kind, max_num_seqs=2)
    driver.add(make_request("many", range(9), 6, n=5))
    driver.add(make_request("next", range(5), 2))
    driver.run()
    assert admitted(driver) == ["many"] * 5 + ["next"]
    check_outputs(driver)


@pytest.mark.parametrize("kind", BATCHED)
def test_a_request_that_does_not_fit_whole_goes_into_the_next_batch(kind: BatchingName) -> None:
    driver = make_driver(kind)
    for name, n in (("a", 1), ("b", 2), ("c", 2), ("d", 1)):
        driver.add(make_request(name, [ord(name)] * 5, 4, n=n))
    driver.run()
    assert admitted(driver) == ["a", "b", "b", "c", "d", "c"] or admitted(driver) == ["a", "b", "b", "c", "c", "d"]
    first_of_c = next(i for i, step in enumerate(driver.steps) if "c" in {name for name, _, _ in step.record.rows})  # type: ignore[union-attr]
    assert all("b" not in {name for name, _, _ in step.record.rows} for step in driver.steps[first_of_c:])  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", BATCHED)
def test_a_preempted_member_returns_to_its_batch(kind: BatchingName) -> None:
    driver = make_driver(kind, num_pages=8, max_num_seqs=2)
    for name in "abc":
        driver.add(make_request(name, [ord(name)] * 8, 14))
    driver.run()
    assert preempted(driver) == [("b", 0)]
    assert admitted(driver) == ["a", "b", "b", "c"]
    check_outputs(driver)


@pytest.mark.parametrize("kind", BATCHED)
def test_a_more_urgent_request_waits_for_the_next_batch_and_is_its_first(kind: BatchingName) -> None:
    driver = make_driver(kind, max_num_seqs=2, scheduling_policy="priority")
    for name in "abc":
        driver.add(make_request(name, range(5), 6))
    while not driver.steps:
        driver.step()
    driver.add(make_request("urgent", range(5), 2, priority=-5))
    driver.run()
    assert admitted(driver) == ["a", "b", "urgent", "c"]
    assert preempted(driver) == []


@pytest.mark.parametrize("kind", BATCHED)
def test_after_a_workers_death_a_batch_goes_on(kind: BatchingName) -> None:
    driver = make_driver(kind, max_num_seqs=2)
    for name in "abc":
        driver.add(make_request(name, range(5), 6))
    for _ in range(4):
        driver.step()
    driver.reset_worker()
    driver.run()
    assert [name for name in admitted(driver) if name == "c"] == ["c"]
    assert admitted(driver)[-1] == "c"
    check_outputs(driver)


@pytest.mark.parametrize("kind", BATCHED)
def test_a_batch_does_not_wait_for_a_paused_member(kind: BatchingName) -> None:
    driver = make_driver(kind, max_num_seqs=2)
    for name in "abc":
        driver.add(make_request(name, [ord(name)] * 5, 6))
    for _ in range(3):
        driver.step()
    driver.scheduler.pause("b")
    for _ in range(9):
        driver.step()
    assert ("a", 0) in driver.finished
    assert admitted(driver) == ["a", "b", "c"]
    driver.scheduler.resume("b")
    driver.run()
    assert admitted(driver) == ["a", "b", "c", "b"]
    check_outputs(driver)


@pytest.mark.parametrize("kind", BATCHED)
def test_a_member_that_resumes_in_time_is_in_its_batch_still(kind: BatchingName) -> None:
    driver = make_driver(kind, max_num_seqs=2)
    for name in "abc":
        driver.add(make_request(name, [ord(name)] * 5, 9))
    for _ in range(3):
        driver.step()
    driver.scheduler.pause("b")
    driver.step()
    driver.scheduler.resume("b")
    driver.run()
    assert admitted(driver) == ["a", "b", "b", "c"]


@pytest.mark.parametrize("kind", BATCHED)
def test_a_batch_whose_members_all_leave_ends(kind: BatchingName) -> None:
    driver = make_driver(kind, max_num_seqs=2)
    for name in "abc":
        driver.add(make_request(name, range(5), 90))
    driver.step()
    driver.step()
    driver.abort("a")
    driver.abort("b")
    driver.run()
    assert admitted(driver) == ["a", "b", "c"]


@pytest.mark.parametrize("kind", BATCHED)
def test_grammars_that_are_not_ready_do_not_split_a_batch(kind: BatchingName) -> None:
    driver = make_driver(kind, max_num_seqs=3)
    for i, name in enumerate("abcd"):
        driver.add(make_request(name, range(5), 6, grammar="" if i == 1 else name))
    driver.run()
    names = [name for step in begun(driver) for name in step]
    assert set(names[:3]) == {"a", "b", "c"}
    assert names[3] == "d"
    check_outputs(driver)


def test_sequences_of_similar_predicted_lengths_run_together() -> None:
    """Two tenants: one asks for short answers, the other one for long ones; both allow as many tokens."""
    waste = {}
    kinds: tuple[BatchingName, ...] = ("static", "length-aware")
    for kind in kinds:
        driver = make_driver(kind, num_pages=2000)
        for i in range(40):
            tenant, length = (("short", 5), ("long", 50))[i % 2]
            alone = solo_run([i] * 9, SamplingParams(max_tokens=60), 0, driver.limits)
            driver.add(make_request(f"{tenant}{i}", [i] * 9, 60, tenant=tenant, stop=(alone[length - 1],)))
        driver.run()
        rows = [step.record.num_rows for step in driver.steps if step.record]
        waste[kind] = 1 - sum(rows) / (4 * len(rows))
        check_outputs(driver)
    assert waste["static"] > 0.3
    assert waste["length-aware"] < 0.5 * waste["static"]


def test_the_longest_waiting_is_in_the_next_batch_whatever_its_length() -> None:
    driver = make_driver("length-aware", max_num_seqs=2)
    driver.add(make_request("runs", range(5), 3))
    driver.step()
    driver.add(make_request("odd", range(60), 60))
    for i in range(6):
        driver.add(make_request(f"even{i}", range(5), 3))
    driver.run()
    assert "odd" in begun(driver)[1]


@pytest.mark.parametrize("kind", BATCHED)
@pytest.mark.parametrize("first_seed", range(0, 60, 20))
def test_every_sequence_has_its_solo_output(kind: BatchingName, first_seed: int) -> None:
    """Aborts, deaths, restarts, lags and preemptions, with the state checked after each."""
    for seed in range(first_seed, first_seed + 20):
        try:
            random_trace(seed, batching=kind, batch_wait_ms=20)
        except BaseException as error:
            error.add_note(f"trace of seed {seed}")
            raise
