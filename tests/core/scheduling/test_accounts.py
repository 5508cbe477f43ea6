"""Bills: each step's time is shared by the documented formula, once; KV memory is counted while it is held."""

from collections import defaultdict
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core.scheduling.scheduler import ScheduledStep
from penstock.core.sequences.limits import WorkerLimits
from penstock.ipc.codec import pack_int32, unpack_int32
from penstock.ipc.messages import SequenceBill, StepPlan
from tests.core.driver import PAGE_BYTES, Driver, SequenceName, make_limits, make_request
from tests.core.kv.test_window_pages import window_limits
from tests.core.scheduling.test_drafts import Oracle as Drafts
from tests.core.scheduling.test_scheduler_traces import random_trace


class Oracle(Driver):
    """Shares every step row by row, from its plan, and integrates pages over time. A step's time is random."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rng = Random(5)
        self.planned: dict[int, tuple[StepPlan, list[SequenceName], int]] = {}
        self.shares: dict[SequenceName, float] = defaultdict(float)
        self.steps_of: dict[SequenceName, int] = defaultdict(int)
        self.byte_seconds: dict[SequenceName, float] = defaultdict(float)
        self.num_late = 0  # bills that waited for a step
        self.total_us = 0
        self.unbilled = 0.0

    def pass_time(self) -> None:
        seconds = self.rng.choice([0.0, 0.25, 1.5])
        for seq in self.scheduler.running:
            pages = len(seq.page_ids) + sum(len(table.page_ids) for table in seq.window_tables)
            self.byte_seconds[seq.request_id, seq.sequence_idx] += pages * PAGE_BYTES * seconds
        self.now += seconds

    def schedule(self) -> ScheduledStep | None:
        self.pass_time()
        step = super().schedule()
        if step is not None and step.record is not None:
            names = [(request_id, idx) for request_id, idx, _ in step.record.rows]
            self.planned[step.plan.step_id] = step.plan, names, len(self.scheduler.in_flight[-1].decodes.seqs)
        return step

    def abort(self, request_id: str, sequence_idx: int = -1) -> None:
        self.pass_time()
        super().abort(request_id, sequence_idx)
        self.num_late += len(self.scheduler.accounts._due)

    def process(self) -> Any:
        self.pass_time()
        us = self.rng.choice([0, 700, 1000, 250_000])
        self.results[0] = replace(self.results[0], num_forward_us=us)
        plan, names, num_decodes = self.planned.pop(self.results[0].step_id)
        live = [name for name in names if name not in self.bills]
        plan = self.as_computed(plan)
        told = super().process()
        self.share(plan, names, num_decodes, live, us)
        return told

    def as_computed(self, plan: StepPlan) -> StepPlan:
        """With the starts and the guesses that there were; of a row that others have, nobody asks where it began."""
        batch = self.scheduler.in_flight[0].decodes
        starts, sizes = list(unpack_int32(plan.start)), list(unpack_int32(plan.num_new))
        true_starts = self.worker.starts[plan.step_id]
        guessed = list(unpack_int32(self.results[0].num_drafted)) or [0] * len(batch.seqs)
        for i, (seq, epoch) in enumerate(zip(batch.seqs, batch.epochs, strict=True)):
            sizes[i] = 1 + guessed[i]
            if seq.running_epoch == epoch:
                starts[i] = true_starts[i]
        return replace(plan, start=pack_int32(starts), num_new=pack_int32(sizes))

    def share(
        self, plan: StepPlan, names: list[SequenceName], num_decodes: int, live: list[SequenceName], us: int
    ) -> None:
        fixed, row, context, token, pair = self.scheduler.pace.step_time.rates
        starts, sizes = unpack_int32(plan.start), unpack_int32(plan.num_new)
        works = [
            size * fixed / sum(sizes)
            + (row + context * start if i < num_decodes else token * size + pair * size * (start + size / 2))
            for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]
        if not sum(works):
            works = list(sizes)
        self.total_us += us
        for name, work in zip(names, works, strict=True):
            share = us * work / sum(works)
            if name in live:
                self.shares[name] += share
                self.steps_of[name] += 1
            else:
                self.unbilled += share

    def reset_worker(self, limits: WorkerLimits | None = None, *, has_died: bool = True) -> None:
        self.pass_time()
        self.planned.clear()
        super().reset_worker(limits, has_died=has_died)

    def restart_scheduler(self) -> None:
        """Not here: another scheduler has other accounts."""

    def check(self) -> None:
        for name, bill in self.bills.items():
            assert bill.device_us == pytest.approx(self.shares[name], rel=1e-6, abs=1e-3), name
            assert bill.num_steps == self.steps_of[name], name
            assert bill.kv_byte_seconds == pytest.approx(self.byte_seconds[name], rel=1e-9, abs=1e-3), name
        billed = sum(bill.device_us for bill in self.bills.values())
        assert billed + self.unbilled == pytest.approx(self.total_us, rel=1e-9, abs=1e-3)
        assert self.scheduler.totals.device_us == self.total_us
        assert {*self.finished, *self.aborted} == set(self.bills), "everybody has a bill"


def check_trace(seed: int, **how: Any) -> Oracle:
    driver = random_trace(seed, make_driver=Oracle, **how)
    assert isinstance(driver, Oracle)
    driver.check()
    return driver


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 32))
def test_shares_add_up_whatever_happens(seed: int) -> None:
    """Aborts, preemptions, deaths, stop tokens, several sequences: against the row by row oracle."""
    check_trace(seed)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([(True, 1), (False, 2), (True, 3)]))
def test_the_same_with_drafts_and_parts(seed: int, how: tuple[bool, int]) -> None:
    has_drafts, num_stages = how
    check_trace(seed, guess=Drafts(seed) if has_drafts else None, num_stages=num_stages)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 32))
def test_the_same_with_windows(seed: int) -> None:
    check_trace(seed, make_limits=window_limits)


def test_the_sums_begin_anew_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.core.scheduling.accounts._MAX_STEPS", 5)
    for seed in range(40):
        check_trace(seed)


def test_the_traces_reach_what_they_are_for() -> None:
    """Bills that wait for steps in flight, work that nobody pays for, lost rows and deaths, and learned rates."""
    late = unbilled = recomputed = deaths = learned = saved = 0
    for seed in range(60):
        driver = check_trace(seed)
        late += driver.num_late
        unbilled += driver.unbilled > 0
        deaths += driver.num_deaths
        learned += driver.scheduler.pace.step_time.rates[2] > 0
        recomputed += sum(bill.num_recomputed_tokens > 0 for bill in driver.bills.values())
        saved += sum(bill.num_saved_tokens > 0 for bill in driver.bills.values())
    reached = (late, unbilled, recomputed, deaths, learned, saved)
    assert min(reached) > 8, reached


def timed(driver: Driver, us: int) -> None:
    """The next step takes so long, and a second passes before and after it."""
    driver.now += 1.0
    assert driver.schedule() is not None
    driver.execute()
    driver.results[0] = replace(driver.results[0], num_forward_us=us)
    driver.now += 1.0
    driver.process()


def test_a_step_is_shared_by_tokens_before_anything_is_learned() -> None:
    driver = Driver(pipeline_depth=0, max_num_batched_tokens=64)
    driver.add(make_request("long", range(30), 1))
    driver.add(make_request("short", range(100, 110), 1))
    timed(driver, 4000)
    assert driver.bills["long", 0].device_us == pytest.approx(3000)
    assert driver.bills["short", 0].device_us == pytest.approx(1000)
    assert driver.bills["long", 0].num_steps == 1
    assert driver.bills["long", 0].kv_byte_seconds == 8 * PAGE_BYTES  # 30 tokens in pages of 4, for a second


def test_long_contexts_pay_for_what_they_read() -> None:
    driver = Driver(make_limits(max_num_batched_tokens=128), pipeline_depth=0)
    driver.scheduler.pace.step_time.rates = (100.0, 10.0, 1.0, 0.0, 0.0)
    driver.add(make_request("long", range(99), 2))
    driver.add(make_request("short", range(200, 209), 2))
    timed(driver, 0)
    timed(driver, 1140)  # 2 rows: 50 + 10 + 99 and 50 + 10 + 9 of 228
    assert driver.bills["long", 0].device_us == pytest.approx(1140 * 159 / 228)
    assert driver.bills["short", 0].device_us == pytest.approx(1140 * 69 / 228)


def test_a_client_that_leaves_pays_for_what_is_in_flight() -> None:
    driver = Driver(pipeline_depth=1)
    driver.add(make_request("left", range(20), 50))
    driver.schedule()
    driver.abort("left")
    assert not driver.bills, "its step is still being computed"
    driver.execute()
    driver.results[0] = replace(driver.results[0], num_forward_us=5000)
    driver.process()
    assert driver.bills["left", 0].device_us == 5000
    driver.check_idle()


def test_a_client_that_leaves_the_queue_pays_with_its_time_only() -> None:
    driver = Driver(make_limits(max_num_seqs=1), pipeline_depth=0)
    driver.now = 10.0
    driver.add(make_request("first", range(20), 50))
    driver.add(make_request("second", range(20), 50))
    timed(driver, 100)
    driver.abort("second")
    assert driver.bills["second", 0] == SequenceBill(queued_us=2_000_000)


def test_work_of_a_worker_that_died_is_not_billed() -> None:
    driver = Driver(pipeline_depth=1)
    driver.add(make_request("a", range(20), 2))
    driver.schedule()
    driver.reset_worker()
    timed(driver, 300)
    timed(driver, 20)
    assert driver.bills["a", 0].device_us == 320
    assert driver.bills["a", 0].num_recomputed_tokens == 0, "nothing of it had returned"


def test_what_is_computed_twice_is_told() -> None:
    driver = Driver(pipeline_depth=0, enable_prefix_caching=False)
    driver.add(make_request("a", range(20), 3))
    timed(driver, 300)
    driver.reset_worker()
    for _ in range(2):
        timed(driver, 20)
    assert driver.bills["a", 0].num_recomputed_tokens == 20
