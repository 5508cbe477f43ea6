"""The deadline policy: earliest slack first, by costs that are measured; late requests are refused or demoted.

That nobody starves is in test_starvation.py, with the other policies."""

from collections import deque
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.core.sequences.limits import WorkerLimits
from penstock.ipc.codec import unpack_int32
from penstock.ipc.messages import AddRequest
from penstock.parts.policies.scheduler.order import Order
from tests.core.driver import Driver, make_limits, make_request
from tests.core.scheduling.test_preemption import preempted
from tests.core.scheduling.test_prefill_pace import chunk_sizes
from tests.core.scheduling.test_scheduler_traces import random_requests, random_trace
from tests.parts.policies.test_policies import admitted, check_outputs


class Timed(Driver):
    """Steps take time: so many milliseconds each, for each row, and for each token of a prompt."""

    def __init__(
        self,
        *,
        ms_per_step: float = 10.0,
        ms_per_row: float = 0.0,
        ms_per_token: float = 1.0,
        max_num_seqs: int = 4,
        num_pages: int = 400,
        policy: str = "deadline",
        **options: Any,
    ) -> None:
        limits = make_limits(
            num_pages=num_pages, page_size=16, max_num_seqs=max_num_seqs, max_num_batched_tokens=512, max_model_len=2048
        )
        fixed: dict[str, Any] = {"pipeline_depth": 0, "enable_prefix_caching": False}
        super().__init__(limits, **{"scheduling_policy": policy} | fixed | options)
        self.ms_per_step, self.ms_per_row, self.ms_per_token = ms_per_step, ms_per_row, ms_per_token
        self.first_at: dict[str, float] = {}
        self.last_at: dict[str, float] = {}

    def execute(self) -> None:
        sizes = unpack_int32(self.plans[0].num_new)
        super().execute()
        num_tokens = sum(size for size in sizes if size > 1)
        ms = self.ms_per_step + self.ms_per_row * sum(size == 1 for size in sizes) + self.ms_per_token * num_tokens
        self.results[-1] = replace(self.results[-1], num_forward_us=round(ms * 1000))
        self.now += ms / 1000

    def process(self) -> Any:
        deltas = super().process()
        for each in deltas.values():
            for delta in each:
                if delta.token_ids:
                    self.first_at.setdefault(delta.request_id, self.now)
                    self.last_at[delta.request_id] = self.now
        return deltas

    def learn(self) -> "Timed":
        """Let it see what steps cost."""
        for i in range(8):
            self.add(make_request(f"before{i}", range(20 + 30 * (i % 3)), 4 + i))
        self.run()
        assert self.scheduler.parts.get(Order) is not None
        self.steps.clear()
        return self


def add(driver: Timed, name: str, num_tokens: int = 20, length: int = 5, **targets: float) -> None:
    driver.add(make_request(name, [ord(name[0])] * num_tokens, length, **targets))  # type: ignore[arg-type]


def test_the_least_slack_goes_first() -> None:
    driver = Timed(max_num_seqs=1).learn()
    add(driver, "runs", length=10)
    driver.step()
    add(driver, "none")
    add(driver, "wide", ttft_left=5.0)
    add(driver, "near", ttft_left=2.0)
    add(driver, "also near, with more to compute", num_tokens=500, ttft_left=2.2)
    add(driver, "client", seconds_left=3.0)
    driver.run()
    names = [name.split(",")[0] for name in admitted(driver)]
    assert names == ["runs", "also near", "near", "client", "wide", "runs", "none"]
    assert preempted(driver) == [("runs", 0)], "it has no targets: who has some takes its row"
    check_outputs(driver)


def test_nobody_with_targets_gives_its_row_to_another() -> None:
    driver = Timed(max_num_seqs=1).learn()
    add(driver, "wide", length=10, ttft_left=50.0)
    driver.step()
    add(driver, "near", ttft_left=2.0)
    driver.run()
    assert preempted(driver) == []


@pytest.mark.parametrize("policy", ["deadline", "deadline-refuse"])
def test_a_request_that_is_late_already(policy: str) -> None:
    """It needs 210 ms, and has 150."""
    driver = Timed(max_num_seqs=1, policy=policy).learn()
    add(driver, "runs", length=100, ttft_left=5.0)
    driver.step()
    request = make_request("late", [5] * 200, 5, ttft_left=0.15)
    refusal = driver.add(request)
    if policy == "deadline-refuse":
        assert refusal is not None
        assert refusal.code == "unattainable", "even alone it would take longer"
        assert "within 150 ms, and takes 2" in refusal.reason
        assert "late" not in driver.scheduler.requests
        return
    assert refusal is None
    add(driver, "none")
    add(driver, "fine", ttft_left=3.0)
    driver.run()
    assert admitted(driver) == ["runs", "fine", "late", "none"]
    assert "takes about" in driver.late["late"] or "takes 2" in driver.late["late"]
    assert "fine" not in driver.late


@pytest.mark.parametrize("policy", ["deadline", "deadline-refuse"])
def test_a_request_that_becomes_late_while_it_waits(policy: str) -> None:
    driver = Timed(max_num_seqs=1, policy=policy).learn()
    add(driver, "runs", length=100, ttft_left=5.0)  # for about a second
    driver.step()
    add(driver, "late", num_tokens=100, ttft_left=0.5)
    while "late" in driver.scheduler.requests and not driver.scheduler.requests["late"].late:
        driver.step()
    assert 0.3 < driver.now - driver.first_at["runs"] < 0.42, "100 ms for the prompt, and a step or two"
    driver.run()
    if policy == "deadline-refuse":
        delta = driver.finished["late", 0]
        assert delta.error_code == "late"
        assert "the first token is due in" in delta.error
        assert "ms in the queue" in delta.error
        assert admitted(driver) == ["runs"]
    else:
        assert "ms in the queue" in driver.late["late"]
        assert admitted(driver) == ["runs", "late"]


def test_a_pace_that_no_step_can_keep_is_unattainable() -> None:
    driver = Timed(policy="deadline-refuse").learn()
    refusal = driver.add(make_request("fast", range(20), 5, tpot=0.005))
    assert refusal is not None
    assert refusal.code == "unattainable"
    assert refusal.reason.startswith("a token for each 5 ms was asked for, and one takes 10")
    assert driver.add(make_request("slow", range(20), 5, tpot=0.02)) is None


def test_before_anything_is_known_nobody_is_refused() -> None:
    driver = Timed(policy="deadline-refuse")
    assert driver.add(make_request("a", range(20), 5, ttft_left=0.001, tpot=0.001)) is None


def test_the_size_of_chunks_follows_the_tightest_pace() -> None:
    driver = Timed(ms_per_step=10.0, ms_per_token=1.0, max_prefill_ms=250).learn()
    add(driver, "a", length=200, tpot=0.05)
    add(driver, "b", length=30, tpot=0.03)
    for _ in range(4):
        driver.step()
    add(driver, "prompt", num_tokens=1000, length=2)
    driver.run()
    sizes = chunk_sizes(driver.steps, "prompt")
    beside_b = [size for size in sizes[:15] if size > 1]
    assert 14 <= min(beside_b) <= max(beside_b) <= 21, "20 ms beside a step's 10"
    assert 35 <= max(sizes[32:38]) <= 42, "40 ms when b has ended"
    gaps = (driver.last_at["a"] - driver.first_at["a"]) / 199
    assert gaps <= 0.05


def test_nobody_joins_who_would_make_steps_too_long() -> None:
    """Rows cost 5 ms each: three of them fit into 30 ms."""
    driver = Timed(ms_per_step=10.0, ms_per_row=5.0, max_num_seqs=8)
    for i in range(6):  # it learns what rows cost from several numbers of them
        for j in range(1 + i):
            driver.add(make_request(f"{i}-{j}", range(20), 90))
        driver.run()
    driver.steps.clear()
    for name in "abcdef":
        add(driver, name, length=60, tpot=0.03)
    driver.run()
    most = max(step.record.num_rows for step in driver.steps if step.record)
    assert 3 <= most <= 4
    reasons = {reason for step in driver.steps if step.record for reason in step.record.waiting_reasons}
    assert "targets of those that run" in reasons
    for name in "abcdef":
        assert (driver.last_at[name] - driver.first_at[name]) / 59 <= 0.033


def test_out_of_pages_the_rest_yields_first_then_the_most_slack() -> None:
    driver = Timed(num_pages=12).learn()
    add(driver, "wide", num_tokens=40, length=60, ttft_left=9.0, tpot=0.5)
    add(driver, "none", num_tokens=40, length=60)
    add(driver, "tight", num_tokens=40, length=60, ttft_left=9.0, tpot=0.1)
    driver.run()
    assert preempted(driver)[0] == ("none", 0)
    assert ("tight", 0) not in preempted(driver)
    check_outputs(driver)


def test_a_preempted_stream_returns_by_its_pace() -> None:
    driver = Timed(num_pages=9, max_num_seqs=2).learn()
    add(driver, "wide", num_tokens=40, length=60, tpot=0.5)
    add(driver, "tight", num_tokens=40, length=60, tpot=0.1)
    driver.run()
    assert {name for name, _ in preempted(driver)} == {"wide"}
    assert driver.scheduler.stats().num_preemptions > 0
    check_outputs(driver)


def with_targets(rng: Random, limits: WorkerLimits) -> deque[AddRequest]:
    """Some with targets that they meet, some with others."""
    return deque(
        replace(request, ttft_left=rng.choice([0.0, 0.1, 1.0, 100.0]), tpot=rng.choice([0.0, 0.5]))
        for request in random_requests(rng, limits)
    )


@pytest.mark.parametrize("batching", ["continuous", "static", "dynamic", "length-aware"])
@pytest.mark.parametrize("policy", ["deadline", "deadline-refuse"])
def test_every_sequence_has_its_solo_output_or_was_refused(policy: str, batching: str) -> None:
    """Aborts, deaths, restarts, lags and preemptions, with the state checked after each."""
    num_refused = num_demoted = 0
    options: dict[str, Any] = {"scheduling_policy": policy, "batching": batching}
    for seed in range(12):
        driver = random_trace(seed, make_requests=with_targets, seconds_per_call=0.01, **options)
        num_refused += sum(delta.error_code == "late" for delta in driver.finished.values())
        num_demoted += len(driver.late)
    assert (num_refused > 0, num_demoted > 0) == (policy == "deadline-refuse", policy == "deadline")
