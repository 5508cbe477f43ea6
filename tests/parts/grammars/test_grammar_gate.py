"""A request with a grammar waits beside the queue until the worker has it ready; nobody else waits for it."""

import pytest

from penstock.core.scheduling.trials import ENDS_WORKERS
from penstock.parts.grammars.messages import GrammarPrepared
from penstock.parts.grammars.scheduler import BYTES_IN_USE, MAX_BYTES, GrammarGate
from tests.core.driver import Driver, make_limits, make_request


def names(driver: Driver) -> set[str]:
    return {name for name, _ in driver.finished}


def run_without_preparing(driver: Driver) -> None:
    """Let all that may run come to its end."""
    while driver.schedule() is not None or driver.plans or driver.results:
        if driver.plans:
            driver.execute()
        if driver.results:
            driver.process()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_others_run_while_a_grammar_is_made_ready(depth: int) -> None:
    driver = Driver(pipeline_depth=depth)
    driver.add(make_request("held", range(10), 5, n=6, grammar="g"))
    driver.add(make_request("free", range(3, 12), 40))
    run_without_preparing(driver)
    assert names(driver) == {"free"}
    assert [message.grammar for message in driver.worker.asked] == ["g"]
    assert driver.scheduler.stats().num_waiting == 6
    driver.run()
    assert names(driver) == {"free", "held"}
    assert driver.worker.num_prepared == 1


def num_live(driver: Driver) -> int:
    gate = driver.scheduler.parts.get(GrammarGate)
    assert gate is not None
    return len(gate)


def test_one_text_is_made_ready_once_for_all_that_want_it() -> None:
    driver = Driver(make_limits(max_num_seqs=4))
    for i in range(6):
        driver.add(make_request(f"r{i}", range(i + 1), 20, n=2, grammar="same"))
    driver.run()
    assert len(names(driver)) == 6
    assert driver.worker.num_prepared == 1


def test_a_grammar_that_cannot_be_used_ends_its_requests_alone() -> None:
    driver = Driver()
    driver.add(make_request("bad", range(5), 5, n=3, grammar="bad one"))
    driver.add(make_request("good", range(5), 5, grammar="g"))
    driver.run()
    assert len(driver.outputs["good", 0]) == 5
    for i in range(3):
        last = driver.finished["bad", i]
        assert (last.finish_reason, last.error_code, last.error) == ("error", "grammar", "bad one cannot be used")


def test_live_grammars_are_bounded_in_number() -> None:
    driver = Driver(make_limits(max_num_seqs=2, num_pages=256))
    for i in range(9):
        driver.add(make_request(f"r{i}", range(5), 3, grammar=f"g{i}"))
    driver.schedule()
    assert num_live(driver) == len(driver.worker.asked) == 2
    driver.add(make_request("free", range(5), 3))
    run_without_preparing(driver)
    assert names(driver) == {"free"}
    driver.run()
    assert len(names(driver)) == 10


def test_live_grammars_are_bounded_in_bytes_and_one_always_fits() -> None:
    driver = Driver()
    half = MAX_BYTES // 2
    for i in range(6):
        driver.add(make_request(f"r{i}", range(5), 3, grammar=f"g{i}", grammar_bytes=half))
    driver.add(make_request("huge", range(5), 3, grammar="huge", grammar_bytes=2 * MAX_BYTES))
    driver.schedule()
    assert num_live(driver) == 1  # two and what they grow to are too many
    assert half * 2 + BYTES_IN_USE > MAX_BYTES
    driver.run()
    assert len(names(driver)) == 7


def test_whoever_leaves_passes_the_room_on() -> None:
    driver = Driver(make_limits(max_num_seqs=1))
    for i in range(5):
        driver.add(make_request(f"r{i}", range(5), 3, grammar=f"g{i}"))
    driver.schedule()
    driver.abort("r0")  # r1 may ask now,
    driver.abort("r1")  # but leaves before it does
    driver.abort("r3")
    driver.run()
    assert names(driver) == {"r2", "r4"}


def test_a_paused_request_gives_its_grammar_back_and_asks_again() -> None:
    driver = Driver(make_limits(max_num_seqs=1))
    driver.add(make_request("a", range(5), 30, grammar="g"))
    driver.add(make_request("b", range(5), 3, grammar="h"))
    for _ in range(6):
        driver.step()
    assert 0 < len(driver.outputs["a", 0]) < 30
    driver.scheduler.pause("a")
    while driver.step() and names(driver) != {"b"}:
        pass
    driver.scheduler.resume("a")
    driver.run()
    assert len(driver.outputs["a", 0]) == 30
    assert driver.worker.num_prepared == 3


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_new_worker_is_asked_again_and_nobody_waits_for_it(is_ready: bool) -> None:
    driver = Driver(pipeline_depth=1)
    driver.add(make_request("a", range(5), 30, n=3, grammar="g"))
    driver.add(make_request("free", range(3, 12), 30))
    for _ in range(8 if is_ready else 0):
        driver.step()
    if not is_ready:
        driver.schedule()
    driver.reset_worker(has_died=False)
    assert not driver.worker.grammars
    run_without_preparing(driver)
    assert names(driver) == {"free"}
    driver.run()
    assert names(driver) == {"a", "free"}
    assert driver.worker.num_prepared == 1


def test_an_answer_to_a_question_before_the_death_means_nothing() -> None:
    driver = Driver()
    driver.add(make_request("a", range(5), 3, grammar="g"))
    driver.schedule()
    old = driver.worker.asked[0].grammar_id
    driver.reset_worker(has_died=False)
    driver.schedule()
    assert driver.worker.asked[0].grammar_id != old
    assert not driver.scheduler.answered(GrammarPrepared(old, "too late"))
    driver.run()
    assert len(driver.outputs["a", 0]) == 3


def test_a_grammar_that_ends_workers_ends() -> None:
    driver = Driver()
    driver.add(make_request("poison", range(5), 3, n=2, grammar="g"))
    driver.add(make_request("next", range(5), 3, grammar="h"))
    for _ in range(2):
        driver.schedule()
        driver.reset_worker()
    driver.run()
    assert {driver.finished["poison", i].error for i in range(2)} == {ENDS_WORKERS}
    assert len(driver.outputs["next", 0]) == 3


def test_a_grammar_is_not_blamed_for_what_a_step_did() -> None:
    """Two workers die: one while it is being made beside a step, the other of a step before it is made alone."""
    driver = Driver(pipeline_depth=1)
    for i in range(4):
        driver.add(make_request(f"free {i}", range(5 + i), 30))
    driver.add(make_request("held", range(7), 3, n=2, grammar="g"))
    for _ in range(2):
        while not driver.worker.asked and not driver.scheduler.is_on_trial:
            driver.schedule()
            if not driver.worker.asked and not driver.scheduler.is_on_trial:
                driver.execute()
                driver.process()
        assert driver.scheduler.in_flight
        driver.reset_worker()
    driver.run()
    assert all(delta.finish_reason == "length" for delta in driver.finished.values())
    assert names(driver) == {"held", *(f"free {i}" for i in range(4))}


def test_no_step_runs_beside_a_suspected_grammar() -> None:
    driver = Driver()
    driver.add(make_request("held", range(7), 3, grammar="g"))
    driver.schedule()
    driver.reset_worker()  # it had nothing else to do, but this was the first time
    driver.add(make_request("free", range(5), 5))
    while driver.schedule() is not None or driver.plans:
        driver.execute()
        driver.process()
    assert driver.scheduler.is_on_trial
    assert driver.schedule() is None
    assert "free" not in names(driver)
    driver.run()
    assert names(driver) == {"held", "free"}
