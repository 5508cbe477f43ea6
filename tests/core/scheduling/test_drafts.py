"""Steps that bring a number of tokens for each row, and plans that take a part of the rows.

A toy drafter and the fake worker, through the real scheduler.
"""

from array import array
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.core.scheduling.scheduler import Deltas, UnexpectedResultError
from penstock.ipc.codec import pack_int32, unpack_int32
from penstock.ipc.messages import StepResult
from penstock.parts.drafts.scheduler.adaptive import AdaptiveLengths
from tests.core.driver import Driver, make_limits, make_request
from tests.core.fake_worker import Row, next_token, solo_run
from tests.core.kv.test_window_pages import window_limits
from tests.core.scheduling.test_scheduler_traces import random_limits, random_trace
from tests.faults.soak import sized
from tests.parts.drafts.lengths import drafting_of

PROMPT = [5, 6, 7]


class Oracle:
    """Knows the model, and is wrong now and then."""

    def __init__(self, seed: int, most: int = 3, wrong: float = 0.2) -> None:
        self.rng = Random(seed)
        self.most = most
        self.wrong = wrong

    def __call__(self, row: Row, first: int, most: int) -> list[int]:
        count = self.rng.randint(0, min(most, self.most))
        tokens = array("i", row.token_ids[:first])
        while len(tokens) < first + count:
            tokens.append(next_token(tokens, row.sampling, len(tokens) - row.num_prompt_tokens, 1000))
        return [self.rng.randrange(1000) if self.rng.random() < self.wrong else t for t in tokens[first:]]


@pytest.mark.parametrize("first_seed", range(0, sized(120, 240), 40))
def test_every_sequence_has_its_solo_output(first_seed: int) -> None:
    """Whatever is guessed and accepted, preempted, aborted or lost with its worker."""
    for seed in range(first_seed, first_seed + 40):
        try:
            limits = window_limits if seed % 5 == 0 else random_limits
            random_trace(seed, limits, guess=Oracle(seed) if seed % 4 else None, num_stages=1 + seed % 3)
        except BaseException as error:
            error.add_note(f"trace of seed {seed}")
            raise


def test_the_traces_reach_what_they_are_for() -> None:
    drafts = accepted = bounds = preemptions = 0
    for seed in range(1000, 1030):
        driver = random_trace(seed, guess=Oracle(seed))
        drafts += sum(sum(unpack_int32(step.plan.num_drafts)) for step in driver.steps)
        bounds += sum(sum(step.plan.start_bounds) for step in driver.steps)
        accepted += driver.num_accepted
        preemptions += sum(totals.num_preemptions for totals in driver.totals)
    reached = (drafts, accepted, bounds, preemptions)
    assert min(reached) > 15, reached


class Given:
    """Guesses the solo run, without a mistake."""

    def __init__(self, expected: list[int]) -> None:
        self.known = PROMPT + expected

    def __call__(self, row: Row, first: int, most: int) -> list[int]:
        return self.known[first : first + most]


def with_right_guesses(max_tokens: int, most: int, *, depth: int = 0, stop: tuple[int, ...] = ()) -> Driver:
    """A driver with one request, whose worker accepts all that is right."""
    request = make_request("a", PROMPT, max_tokens, stop=stop)
    limits = make_limits(page_size=4)
    solo = solo_run(PROMPT, make_request("a", PROMPT, max_tokens).sampling, 0, limits)
    driver = Driver(limits, guess=Given(solo), max_drafts=most, pipeline_depth=depth)
    driver.worker.accepts_all = True
    driver.add(request)
    return driver


def test_a_step_brings_as_many_tokens_as_were_right() -> None:
    driver = with_right_guesses(21, 3)
    driver.run()
    # The prompt's token, and then four a step.
    assert [list(unpack_int32(step.plan.num_new)) for step in driver.steps] == [[3], *[[4]] * 5]
    assert driver.num_accepted == 15


def test_a_start_that_depends_on_drafts_in_flight_is_a_bound() -> None:
    driver = with_right_guesses(40, 2, depth=1)
    for _ in range(3):
        driver.schedule()
        if len(driver.plans) == 2:
            driver.execute()
            driver.process()
    plans = [step.plan for step in driver.steps]
    assert [bytes(plan.start_bounds) for plan in plans] == [b"", b"\0", b"\1"]
    assert [unpack_int32(plan.start)[0] for plan in plans] == [0, 3, 6]
    driver.run()


def test_what_comes_after_a_stop_token_is_dropped() -> None:
    solo = solo_run(PROMPT, make_request("a", PROMPT, 12).sampling, 0, make_limits())
    driver = with_right_guesses(12, 3, stop=(solo[2],))
    driver.run()
    assert driver.outputs["a", 0] == solo[:3]
    assert driver.finished["a", 0].stop_token_id == solo[2]
    assert driver.scheduler.totals.num_output_tokens == 3
    assert driver.scheduler.totals.num_dropped_tokens == 2


def test_drafts_are_left_out_where_pages_are_short() -> None:
    request = make_request("a", PROMPT, 6)
    limits = make_limits(num_pages=2, page_size=4, max_model_len=8)
    driver = Driver(limits, guess=Oracle(0, most=9, wrong=0), max_drafts=9, pipeline_depth=0)
    driver.add(request)
    driver.run()
    assert driver.outputs["a", 0] == solo_run(PROMPT, request.sampling, 0, limits)
    assert max(max(unpack_int32(step.plan.num_new)) for step in driver.steps) <= 5


def test_totals_tell_what_came_of_guesses() -> None:
    driver = with_right_guesses(21, 3)
    driver.run()
    stats = driver.scheduler.stats().drafts
    assert stats is not None
    assert (stats.drafter, stats.is_on, stats.num_steps) == ("oracle", True, 5)
    assert (stats.num_guessed, stats.num_accepted, stats.acceptance) == (15, 15, 1.0)
    assert (stats.guessed_at, stats.accepted_at) == ((5, 5, 5), (5, 5, 5))
    assert Driver(make_limits()).scheduler.stats().drafts is None


def test_a_step_s_record_tells_how_many_may_be_guessed() -> None:
    driver = with_right_guesses(21, 3)
    driver.run()
    records = [step.record for step in driver.steps if step.record is not None]
    assert [record.num_drafts for record in records] == [[], *[[3]] * 5]
    assert {record.why_drafts for record in records} == {"fixed"}
    assert records[1].rows == [("a", 0, 1)]


def test_every_sequence_has_its_solo_output_with_lengths_that_adapt() -> None:
    """Random traces, with the lengths that a server has; steps with guesses take longer."""
    steps = guessing = 0
    for seed in range(40):
        driver = random_trace(seed, guess=Oracle(seed, wrong=0.1), num_stages=1 + (seed % 3 == 2), make_driver=Timed)
        steps += len(driver.steps)
        guessing += sum(bool(step.plan.num_drafts) for step in driver.steps)
    assert 0.05 * steps < guessing < 0.9 * steps


class Timed(Driver):
    """A step takes a millisecond, and for each guess a hundredth of it; lengths adapt."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._adapt()

    def restart_scheduler(self) -> None:
        super().restart_scheduler()
        self._adapt()

    def _adapt(self) -> None:
        if self.limits.max_drafts:
            drafting_of(self.scheduler).lengths = AdaptiveLengths(self.limits.max_drafts)

    def process(self) -> Deltas:
        num_guessed = sum(unpack_int32(self.results[0].num_drafted))
        self.results[0] = replace(self.results[0], num_forward_us=1000 + 10 * num_guessed)
        return super().process()


@pytest.mark.parametrize(("counts", "num_tokens"), [([3], 3), ([-1], 0), ([2], 1), ([1, 1], 2), ([], 2)])
def test_counts_that_the_drafts_do_not_allow_are_refused(counts: list[int], num_tokens: int) -> None:
    driver = with_right_guesses(12, 1)
    driver.step()
    step = driver.schedule()
    assert step is not None
    assert list(unpack_int32(step.plan.num_drafts)) == [1]
    result = StepResult(step.plan.step_id, pack_int32([1] * num_tokens), num_tokens=pack_int32(counts))
    with pytest.raises(UnexpectedResultError):
        driver.scheduler.process(result)
    driver.execute()
    driver.process()
    driver.run()


def test_plans_that_overlap_have_no_row_in_common() -> None:
    """Two parts: from the first decode on, each plan has rows that the plan before it has not."""
    driver = Driver(num_stages=2, pipeline_depth=1)
    requests = [make_request(f"r{i}", [i, *PROMPT], 20) for i in range(6)]
    for request in requests:
        driver.add(request)
    driver.run()
    for request in requests:
        expected = solo_run(list(unpack_int32(request.prompt_token_ids)), request.sampling, 0, driver.limits)
        assert driver.outputs[request.request_id, 0] == expected
    rows = [set(unpack_int32(step.plan.rows)) for step in driver.steps[1:]]
    assert all(len(each) == 3 for each in rows)
    assert all(not here & after for here, after in pairwise(rows))
