"""A request that ends each worker which computes it is found, and fails alone; other deaths harm nobody."""

from collections.abc import Callable, Iterator
from math import ceil, log2
from typing import Any

import pytest

from penstock.core.scheduling.step_record import ON_TRIAL
from penstock.ipc.codec import unpack_int32
from penstock.ipc.messages import AddRequest, StepPlan
from tests.core.driver import Driver, make_limits, make_request
from tests.core.fake_worker import solo_run

POISON = 777
Verdict = Callable[[Driver, StepPlan], bool]


class WorkerDiedError(Exception):
    """Instead of a result."""


def computed(driver: Driver, plan: StepPlan) -> Iterator[tuple[list[int], int, int]]:
    """Of each row of the plan: its prompt, and the range of positions that it computes."""
    new = {new.row: list(unpack_int32(new.token_ids))[: new.num_prompt_tokens] for new in plan.new_rows}
    for row, start, num_new in zip(*map(unpack_int32, (plan.rows, plan.start, plan.num_new)), strict=True):
        known = driver.worker.rows.get(row)
        prompt = new[row] if row in new or known is None else known.token_ids[: known.num_prompt_tokens]
        yield prompt, start, start + num_new


def reads_poison(driver: Driver, plan: StepPlan) -> bool:
    """The plan computes a position with the poisonous token."""
    return any(POISON in prompt[start:end] for prompt, start, end in computed(driver, plan))


class Mortal(Driver):
    """A driver whose workers die as the verdict says; the next one is there at once."""

    def __init__(self, is_deadly: Verdict, num_seqs: int, **options: Any) -> None:
        super().__init__(make_limits(num_pages=512, max_num_seqs=num_seqs, vocab_size=POISON + 1), **options)
        self.is_deadly = is_deadly
        self.is_out_of_memory = False

    def execute(self) -> None:
        if self.is_deadly(self, self.plans[0]):
            raise WorkerDiedError
        super().execute()

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            try:
                if not self.step():
                    self.check_idle()
                    return
            except WorkerDiedError:
                is_cut = self.is_out_of_memory and self.scheduler.step_size.cut(self.scheduler.in_flight)
                self.reset_worker(self.limits, has_died=not is_cut)
        raise AssertionError("no end")


def requests(num: int, poisoned: set[int], num_tokens: int = 6) -> list[AddRequest]:
    return [make_request(f"r{i}", [i, 5, POISON if i in poisoned else 6, 7, 8], num_tokens, seed=i) for i in range(num)]


def check(driver: Driver, added: list[AddRequest], guilty: set[str]) -> None:
    for request in added:
        for idx in range(request.n):
            name = (request.request_id, idx)
            last = driver.finished[name]
            if request.request_id in guilty:
                assert last.finish_reason == "error"
                assert last.error_code == "ends_workers"
                assert last.error
            else:
                assert last.finish_reason == "length"
                expected = solo_run(list(unpack_int32(request.prompt_token_ids)), request.sampling, idx, driver.limits)
                assert driver.outputs[name] == expected


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("culprit", [0, 13, 30, 31])
def test_one_poison_among_many_fails_alone(culprit: int, depth: int) -> None:
    driver = Mortal(reads_poison, 32, pipeline_depth=depth)
    added = requests(32, {culprit})
    for request in added:
        driver.add(request)
    driver.run()
    check(driver, added, {f"r{culprit}"})
    assert driver.num_deaths <= log2(32) + 2


@pytest.mark.parametrize("num", [1, 2, 3, 7])
def test_few_are_told_apart_too(num: int) -> None:
    for culprit in range(num):
        driver = Mortal(reads_poison, 8)
        added = requests(num, {culprit})
        for request in added:
            driver.add(request)
        driver.run()
        check(driver, added, {f"r{culprit}"})
        assert 2 <= driver.num_deaths <= ceil(log2(num)) + 2


def test_several_poisons_and_several_sequences() -> None:
    driver = Mortal(reads_poison, 16)
    added = requests(12, {2, 3, 9})
    added.append(make_request("many", [9, POISON, 4], 5, n=3))
    added.append(make_request("fine", [9, 3, 4], 5, n=3))
    for request in added:
        driver.add(request)
    driver.run()
    check(driver, added, {"r2", "r3", "r9", "many"})


def test_a_poison_in_its_own_output_is_found() -> None:
    """It computes many tokens well before the deadly one comes, and again after each death."""

    def is_deadly(driver: Driver, plan: StepPlan) -> bool:
        return any(prompt[0] == 3 and end > 40 for prompt, _, end in computed(driver, plan))

    driver = Mortal(is_deadly, 8)
    added = requests(8, set(), 60)
    for request in added:
        driver.add(request)
    driver.run()
    check(driver, added, {"r3"})
    assert len(driver.outputs["r3", 0]) >= 35


def test_workers_that_die_by_themselves_harm_nobody() -> None:
    """As long as they get further than their predecessor."""
    count = 0

    def is_deadly(_driver: Driver, _plan: StepPlan) -> bool:
        nonlocal count
        count += 1
        return count % 15 == 0

    for num in (1, 12):
        driver = Mortal(is_deadly, 16)
        added = requests(num, set(), 60)
        for request in added:
            driver.add(request)
        driver.run()
        check(driver, added, set())
        assert driver.num_deaths >= 4


def test_newcomers_wait_while_suspects_are_tried() -> None:
    driver = Mortal(reads_poison, 8)
    for request in requests(4, {3}):
        driver.add(request)
    while driver.num_deaths < 1:
        try:
            driver.step()
        except WorkerDiedError:
            driver.reset_worker()
    late = make_request("late", [1, 2, 3], 4)
    driver.add(late)
    step = driver.schedule()
    assert step is not None
    assert step.record is not None
    assert {name for name, _, _ in step.record.rows} == {"r0", "r1"}
    assert step.record.waiting_reasons == {ON_TRIAL: 3}
    assert len(driver.scheduler.suspects) == 4
    driver.run()
    check(driver, [*requests(4, {3}), late], {"r3"})
    assert not len(driver.scheduler.suspects)


def test_suspects_that_are_aborted_hold_up_nobody() -> None:
    driver = Mortal(reads_poison, 8)
    for request in requests(4, {1}):
        driver.add(request)
    with pytest.raises(WorkerDiedError):
        driver.step()
    driver.reset_worker()
    driver.abort("r0")
    driver.abort("r1")
    driver.run()
    assert set(driver.finished) == {("r2", 0), ("r3", 0)}
    assert driver.num_deaths == 1


def test_a_worker_that_says_hello_again_has_not_died() -> None:
    driver = Driver()
    driver.add(make_request("a", range(5), 6))
    for _ in range(3):
        driver.schedule()
        driver.plans.clear()
        driver.take(driver.scheduler.reset_worker(has_died=False))
    assert not len(driver.scheduler.suspects)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_steps_that_are_too_large_get_smaller(depth: int) -> None:
    """A device that has memory for eight rows, or for twenty tokens: nobody is guilty of that."""
    driver = Mortal(lambda _, plan: len(plan.samples) > 8, 32, pipeline_depth=depth)
    driver.is_out_of_memory = True
    added = requests(32, set(), 30)
    for request in added:
        driver.add(request)
    driver.run()
    check(driver, added, set())
    assert driver.num_deaths <= 3
    assert driver.scheduler.limits.max_num_seqs >= 4
    driver = Mortal(lambda _, plan: sum(unpack_int32(plan.num_new)) > 20, 4, pipeline_depth=depth)
    driver.is_out_of_memory = True
    added = [make_request("long", range(100), 5), make_request("short", range(5), 5)]
    for request in added:
        driver.add(request)
    driver.run()
    check(driver, added, set())
    assert driver.num_deaths <= 3
    assert 8 <= driver.scheduler.limits.max_num_batched_tokens <= 20


def test_memory_that_lacks_at_any_size_is_somebody_s_fault() -> None:
    """And then the others have full steps again."""
    driver = Mortal(reads_poison, 8)
    driver.is_out_of_memory = True
    added = requests(8, {5})
    for request in added:
        driver.add(request)
    driver.run()
    check(driver, added, {"r5"})
    driver.reset_worker(driver.limits)
    assert driver.scheduler.limits == driver.limits
