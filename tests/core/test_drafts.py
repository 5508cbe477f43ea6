"""Steps that bring a number of tokens for each row, and plans that take a part of the rows.

A toy drafter and the fake worker, through the real scheduler.
"""

from array import array
from itertools import pairwise
from random import Random

import pytest

from penstock.core.scheduling.scheduler import UnexpectedResultError
from penstock.core.sequences.sequence import Sequence
from penstock.core.steps.drafts import Drafter
from penstock.ipc.codec import pack_int32, unpack_int32
from penstock.ipc.messages import StepResult
from tests.core.driver import Driver, make_limits, make_request
from tests.core.fake_worker import next_token, solo_run
from tests.core.test_scheduler_traces import random_limits, random_trace
from tests.core.test_window_pages import window_limits

PROMPT = [5, 6, 7]


class Oracle(Drafter):
    """Knows the model, and is wrong now and then; where the sequence stands it must guess like everybody else."""

    def __init__(self, seed: int, most: int = 3, wrong: float = 0.2) -> None:
        self.rng = Random(seed)
        self.most = most
        self.wrong = wrong

    def draft(self, seq: Sequence) -> list[int]:
        first, count = seq.num_computed_tokens, self.rng.randint(0, self.most)
        tokens = array("i", seq.token_ids)
        while len(tokens) < first + count:
            tokens.append(next_token(tokens, seq.sampling(), len(tokens) - seq.request.num_prompt_tokens, 1000))
        return [self.rng.randrange(1000) if self.rng.random() < self.wrong else t for t in tokens[first:][:count]]


@pytest.mark.parametrize("first_seed", range(0, 240, 40))
def test_every_sequence_has_its_solo_output(first_seed: int) -> None:
    """Whatever is guessed and accepted, preempted, aborted or lost with its worker."""
    for seed in range(first_seed, first_seed + 40):
        try:
            limits = window_limits if seed % 5 == 0 else random_limits
            random_trace(seed, limits, drafter=Oracle(seed) if seed % 4 else None, num_parts=1 + seed % 3)
        except BaseException as error:
            error.add_note(f"trace of seed {seed}")
            raise


def test_the_traces_reach_what_they_are_for() -> None:
    drafts = accepted = bounds = preemptions = 0
    for seed in range(1000, 1030):
        driver = random_trace(seed, drafter=Oracle(seed))
        drafts += sum(sum(unpack_int32(step.plan.num_drafts)) for step in driver.steps)
        bounds += sum(sum(step.plan.start_bounds) for step in driver.steps)
        accepted += driver.num_accepted
        preemptions += sum(totals.num_preemptions for totals in driver.totals)
    reached = (drafts, accepted, bounds, preemptions)
    assert min(reached) > 15, reached


class Given(Drafter):
    """Guesses the solo run, without a mistake."""

    def __init__(self, expected: list[int], most: int) -> None:
        self.known = PROMPT + expected
        self.most = most

    def draft(self, seq: Sequence) -> list[int]:
        return self.known[seq.num_computed_tokens :][: self.most]


def with_right_guesses(max_tokens: int, most: int, *, depth: int = 0, stop: tuple[int, ...] = ()) -> Driver:
    """A driver with one request, whose worker accepts all that is right."""
    request = make_request("a", PROMPT, max_tokens, stop=stop)
    limits = make_limits(page_size=4)
    driver = Driver(limits, drafter=Given(solo_run(PROMPT, request.sampling, 0, limits), most), pipeline_depth=depth)
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
    driver.scheduler.drafter = Given(solo, 3)
    driver.run()
    assert driver.outputs["a", 0] == solo[:3]
    assert driver.finished["a", 0].stop_token_id == solo[2]
    assert driver.scheduler.totals.num_output_tokens == 3
    assert driver.scheduler.totals.num_dropped_tokens == 2


def test_drafts_are_left_out_where_pages_are_short() -> None:
    request = make_request("a", PROMPT, 6)
    limits = make_limits(num_pages=2, page_size=4, max_model_len=8)
    driver = Driver(limits, drafter=Oracle(0, most=9, wrong=0), pipeline_depth=0)
    driver.add(request)
    driver.run()
    assert driver.outputs["a", 0] == solo_run(PROMPT, request.sampling, 0, limits)
    assert max(max(unpack_int32(step.plan.num_new)) for step in driver.steps) <= 5


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
    driver = Driver(num_parts=2, pipeline_depth=1)
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
