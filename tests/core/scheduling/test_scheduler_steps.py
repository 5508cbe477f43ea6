"""Batching: who is in a step, with how much; lengths, stops, lag; refusals; purity."""

import subprocess
import sys

import pytest

from penstock.core.scheduling.scheduler import ScheduledStep, UnexpectedResultError
from penstock.ipc.codec import deltas_of, pack_int32, unpack_int32
from penstock.ipc.messages import AddRequest, SamplingParams, StepResult
from tests.core.driver import OWNER, Driver, make_limits, make_request
from tests.core.fake_worker import solo_run


def rows_of(step: ScheduledStep | None) -> list[tuple[str, int, int]]:
    assert step is not None
    assert step.record is not None
    return step.record.rows


def answer(driver: Driver, *tokens: int) -> None:
    """Return chosen tokens for the oldest plan, in place of the worker."""
    driver.results.append(StepResult(driver.plans.popleft().step_id, pack_int32(tokens)))
    driver.process()


def test_a_step_mixes_decodes_then_prefill_chunks_then_admissions() -> None:
    driver = Driver(make_limits(max_num_batched_tokens=10), pipeline_depth=0)
    driver.add(make_request("a", range(4), max_tokens=9))
    assert rows_of(driver.schedule()) == [("a", 0, 4)]
    driver.execute()
    driver.process()
    driver.add(make_request("b", range(100, 112)))
    driver.add(make_request("c", range(200, 206)))
    assert rows_of(driver.schedule()) == [("a", 0, 1), ("b", 0, 9)]
    driver.execute()
    driver.process()
    assert rows_of(driver.schedule()) == [("a", 0, 1), ("b", 0, 3), ("c", 0, 6)]
    driver.run()


def test_requests_join_and_leave_between_two_steps_of_others() -> None:
    driver = Driver(pipeline_depth=1)
    driver.add(make_request("long", range(5), max_tokens=12))
    driver.step()
    driver.add(make_request("short", range(9, 12), max_tokens=2))
    driver.run()
    batches = [[name for name, _, _ in rows_of(step)] for step in driver.steps]
    first = batches.index(["long", "short"])
    assert batches[:first] == [["long"]] * first
    assert batches[first : first + 2] == [["long", "short"]] * 2
    assert batches[first + 2 :] == [["long"]] * (12 - first - 2)


def test_decode_rows_bring_no_tokens_and_pages_only_when_needed() -> None:
    driver = Driver(make_limits(page_size=4), pipeline_depth=1)
    driver.add(make_request("a", range(3), max_tokens=10))
    driver.run()
    plans = [step.plan for step in driver.steps]
    assert [len(plan.new_rows) for plan in plans] == [1] + [0] * 9
    assert [unpack_int32(plan.start)[0] for plan in plans] == [0, *range(3, 12)]
    with_pages = [plan.step_id for plan in plans if plan.page_ids]
    assert with_pages == [2, 6], "positions 4 and 8 begin a page"


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 500])
def test_no_sample_is_launched_beyond_the_length(depth: int, max_tokens: int) -> None:
    driver = Driver(make_limits(max_model_len=20), pipeline_depth=depth)
    driver.add(make_request("a", range(7), max_tokens))
    driver.run()
    num_outputs = min(max_tokens, 13)
    assert driver.worker.num_computed == 7 + num_outputs - 1
    assert len(driver.outputs["a", 0]) == num_outputs
    assert driver.finished["a", 0].finish_reason == "length"
    assert driver.scheduler.totals.num_dropped_tokens == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_token_overruns_by_the_lag_at_most(depth: int) -> None:
    driver = Driver(pipeline_depth=depth)
    free_run = solo_run(list(range(7)), SamplingParams(max_tokens=30), 0, driver.limits)
    driver.add(make_request("a", range(7), 30, stop=(free_run[9],)))
    driver.run()
    assert driver.outputs["a", 0] == free_run[:10]
    last = driver.finished["a", 0]
    assert (last.finish_reason, last.stop_token_id) == ("stop", free_run[9])
    assert driver.scheduler.totals.num_dropped_tokens == depth
    assert driver.worker.num_computed == 7 + 9 + depth


def test_a_stop_token_before_min_tokens_does_not_stop() -> None:
    driver = Driver(pipeline_depth=0)
    driver.add(make_request("a", range(7), 30, min_tokens=3, stop=(5,)))
    for expected in (None, None, "stop"):
        driver.schedule()
        answer(driver, 5)
        assert (("a", 0) in driver.finished) == (expected is not None)
    assert driver.outputs["a", 0] == [5, 5, 5]


def test_a_stop_token_as_the_last_of_the_length_counts_as_stop() -> None:
    driver = Driver(pipeline_depth=0)
    driver.add(make_request("a", range(7), 2, stop=(5,)))
    driver.schedule()
    answer(driver, 6)
    driver.schedule()
    answer(driver, 5)
    assert driver.finished["a", 0].finish_reason == "stop"


def test_the_pipeline_is_filled_to_its_depth_and_no_further() -> None:
    for depth in (0, 1, 2):
        driver = Driver(pipeline_depth=depth)
        driver.add(make_request("a", range(7), 30))
        num_planned = 0
        while driver.schedule() is not None:
            num_planned += 1
        assert num_planned == depth + 1
        assert not driver.scheduler.can_schedule


def test_rows_are_bounded_and_reused() -> None:
    driver = Driver(make_limits(max_num_seqs=2), pipeline_depth=1)
    for i in range(6):
        driver.add(make_request(f"r{i}", [i], 3))
    driver.run()
    assert max(len(rows_of(step)) for step in driver.steps) == 2
    assert {row.row for step in driver.steps for row in step.plan.new_rows} == {0, 1}
    assert len(driver.finished) == 6


def test_seeds_of_the_sequences_of_a_request() -> None:
    driver = Driver()
    driver.add(make_request("a", range(5), 4, n=3, seed=2**63 - 1))
    driver.run()
    seeds = [row.sampling.seed for step in driver.steps for row in step.plan.new_rows]
    assert seeds == [2**63 - 1, 0, 1]


def test_refusals_name_limit_and_value_and_change_nothing() -> None:
    driver = Driver(make_limits(max_model_len=16), max_num_queued_seqs=4)
    too_long = driver.add(make_request("a", range(16)))
    assert too_long is not None
    assert too_long.code == "too_long"
    assert "16" in too_long.reason
    assert "15" in too_long.reason
    assert driver.add(make_request("b", range(15), n=3)) is None
    full = driver.add(make_request("c", range(3), n=2))
    assert full is not None
    assert full.code == "queue_full"
    assert "4" in full.reason
    assert driver.add(make_request("b", range(3))) is not None, "the id is in use"
    assert driver.add(make_request("d", [])) is not None
    assert driver.add(AddRequest("d", b"12345", SamplingParams(max_tokens=1))) is not None
    assert driver.add(make_request("d", [3, 1000])) is not None
    assert driver.add(make_request("d", [3, -1])) is not None
    assert driver.add(make_request("d", [3, 999])) is None
    driver.run()
    assert set(driver.finished) == {("b", 0), ("b", 1), ("b", 2), ("d", 0)}


def test_a_pool_smaller_than_the_model_bounds_the_length() -> None:
    driver = Driver(make_limits(num_pages=3, page_size=4, max_model_len=100))
    assert driver.add(make_request("a", range(12))) is not None
    assert driver.add(make_request("b", range(5), max_tokens=50)) is None
    driver.run()
    assert len(driver.outputs["b", 0]) == 7
    assert driver.finished["b", 0].finish_reason == "length"


def test_a_wrong_result_is_refused_and_changes_nothing() -> None:
    driver = Driver(pipeline_depth=1)
    driver.add(make_request("a", range(7), 3))
    with pytest.raises(UnexpectedResultError):
        driver.scheduler.process(StepResult(0, b""))
    driver.step()
    step_id = driver.scheduler.in_flight[0].step_id
    for bad in (StepResult(step_id + 1, pack_int32([1])), StepResult(step_id, pack_int32([1, 2]))):
        with pytest.raises(UnexpectedResultError):
            driver.scheduler.process(bad)
    driver.run()
    assert driver.outputs["a", 0] == solo_run(list(range(7)), SamplingParams(max_tokens=3), 0, driver.limits)


def test_aborts_at_every_state_give_everything_back() -> None:
    driver = Driver(make_limits(max_num_seqs=2, max_num_batched_tokens=8), pipeline_depth=1)
    driver.add(make_request("prefill", range(30), n=2))
    driver.add(make_request("waiting", range(30)))
    driver.schedule()
    driver.abort("prefill", 1)
    driver.abort("waiting")
    driver.abort("waiting")
    driver.abort("prefill")
    driver.abort("never seen")
    driver.execute()
    assert driver.process() == {}
    driver.check_idle()
    assert driver.scheduler.kv.pool.num_free == driver.limits.num_pages


def test_a_frontend_that_is_gone_takes_only_its_own_requests() -> None:
    driver = Driver()
    for i in range(4):
        driver.add(make_request(f"r{i}", range(5)), b"x" if i % 2 else OWNER)
    driver.step()
    assert driver.scheduler.abort_owner(b"x") == 2
    driver.run()
    assert set(driver.finished) == {("r0", 0), ("r2", 0)}


def test_sequences_too_long_for_the_next_worker_end_with_an_error() -> None:
    driver = Driver(make_limits(max_model_len=64), pipeline_depth=1)
    driver.add(make_request("a", range(20), 20))
    driver.add(make_request("b", range(5), 20))
    for _ in range(4):
        driver.step()
    driver.reset_worker(make_limits(max_model_len=21, num_pages=9))
    assert driver.finished["a", 0].finish_reason == "error"
    assert driver.finished["a", 0].error_code == "internal"
    driver.run()
    assert len(driver.outputs["b", 0]) == 16


def test_priorities_are_heard_by_the_priority_policy_only() -> None:
    order = {}
    for policy in ("fcfs", "priority"):
        driver = Driver(make_limits(max_num_seqs=1), scheduling_policy=policy)
        for name, priority in (("a", 0), ("b", 5), ("c", -5), ("d", 0)):
            driver.add(make_request(name, range(5), 2, priority=priority))
        driver.run()
        order[policy] = [name for name, _ in driver.finished]
    assert order == {"fcfs": ["a", "b", "c", "d"], "priority": ["c", "a", "d", "b"]}


def test_the_record_says_why_sequences_wait() -> None:
    driver = Driver(make_limits(max_num_seqs=2, max_num_batched_tokens=8), scheduling_policy="priority")
    driver.add(make_request("a", range(12), n=2))
    driver.add(make_request("b", range(5), priority=1))
    driver.add(make_request("c", range(5), priority=1))
    first, reasons = driver.schedule(), []
    assert first is not None
    assert first.record is not None
    assert first.record.waiting == [
        ("a", 1, "token budget: 8 of 8 used by 0 decodes and 1 prompt"),
        ("b", 0, "behind the first: its turn comes after 1 other"),
        ("c", 0, "behind the first: its turn comes after 2 others"),
    ]
    assert first.record.waiting_reasons == {"token budget": 1, "behind the first": 2}
    while driver.scheduler.has_work:
        driver.step()
        record = driver.steps[-1].record
        assert record is not None
        assert sum(record.waiting_reasons.values()) == record.num_waiting == len(record.waiting)
        assert record.free_pages + record.cached_pages + record.used_pages == driver.limits.num_pages
        reasons += record.waiting
    assert ("a", 1, "sibling's prompt: 8 of 12 tokens computed") in reasons
    assert ("c", 0, "no free row: 2 of 2 in use, the next one ends in at most about 2 steps") in reasons


def test_the_scheduler_needs_no_torch_no_clock_and_no_event_loop() -> None:
    check = (
        "import sys, penstock.core.scheduling.scheduler, penstock.core.scheduling.invariants;"
        "print([m for m in ('torch', 'asyncio', 'zmq', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_one_token_more_is_told_in_columns_to_each_owner() -> None:
    driver = Driver(pipeline_depth=0)
    for i, (name, owner, max_tokens) in enumerate([("a", b"x", 3), ("b", b"y", 6), ("c", b"x", 6)]):
        driver.add(make_request(name, range(10 * i, 10 * i + 4), max_tokens), owner)
    found = []
    for _ in range(4):
        driver.schedule()
        driver.execute()
        told = driver.scheduler.process(driver.results.popleft())
        driver.take({owner: list(deltas_of(batch)) for owner, batch in told.items()})
        found.append(
            {
                owner: ([delta.request_id for delta in batch.deltas], batch.columns and batch.columns.request_ids)
                for owner, batch in told.items()
            }
        )
    assert found == [
        {b"x": (["a", "c"], None), b"y": (["b"], None)},  # first tokens
        {b"x": ([], ("a", "c")), b"y": ([], ("b",))},
        {b"x": (["a"], ("c",)), b"y": ([], ("b",))},  # the last one of a
        {b"x": ([], ("c",)), b"y": ([], ("b",))},
    ]
    driver.run()
    for name, (request, _) in driver.added.items():
        prompt = list(unpack_int32(request.prompt_token_ids))
        assert driver.outputs[name, 0] == solo_run(prompt, request.sampling, 0, driver.limits)
