"""Under every policy a request gets a row within the policy's bound, whatever comes after it."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ipc.messages import AddRequest
from penstock.parts.policies.scheduler.registry import POLICIES, make_policy
from tests.core.driver import Driver, make_limits, make_request

PATIENCE = 25.0
"""Seconds of max_policy_delay in these tests; a step takes one."""
FOREVER = 1e9
NUM_EXAMPLES = 100 if os.environ.get("PENSTOCK_SOAK") else 10

WITH_KEYS = [
    name for name in POLICIES if name != "deadline-refuse" and make_policy(name).overrides("key")
]  # the one left out does not serve all requests


def request(number: int, size: int, priority: int, family: int, tenant: str = "", weight: float = 1.0) -> AddRequest:
    """One whose prompt begins as all of its family; `size` sets the length of prompt and output.

    The first token is wanted within a time of its own by those of priority 0, without a target by others.
    """
    prompt = [family] * 16 + [100 + number % 800] * (1 + size)
    ttft_left = 0.0 if priority else 5.0 + 200.0 * size
    return make_request(
        f"{number}", prompt, 1 + 2 * size, priority=priority, tenant=tenant, weight=weight, ttft_left=ttft_left
    )


@dataclass
class Watch:
    """Counts by itself how long each request has waited, and notes who got a row before one that was overdue."""

    driver: Driver
    patience: float = PATIENCE
    waited: Counter[str] = field(default_factory=Counter)
    overtaken: list[tuple[str, str]] = field(default_factory=list)  # (who had a row, who still waits)

    def step(self, arrivals: Iterable[AddRequest] = ()) -> None:
        driver = self.driver
        waiting = [each.request_id for each in driver.scheduler.requests.values() if each.waiting]
        driver.now += 1.0
        self.waited.update(dict.fromkeys(waiting, 1))
        for each in arrivals:
            assert driver.add(each) is None
        num_before = len(driver.steps)
        if driver.scheduler.has_work:
            driver.step()
        overdue = [
            each.request_id
            for each in driver.scheduler.requests.values()
            if each.waiting and self.waited[each.request_id] >= self.patience
        ]
        for step in driver.steps[num_before:]:
            assert step.record is not None
            for admission in step.record.admitted:
                if self.waited[admission.request_id] < self.patience:
                    self.overtaken += [(admission.request_id, name) for name in overdue]


def play(policy: str, arrivals: list[tuple[int, int, int, int]], num_rows: int, delay: float = PATIENCE) -> Watch:
    driver = Driver(
        make_limits(max_num_seqs=num_rows, num_pages=256), scheduling_policy=policy, max_policy_delay=delay,
        pipeline_depth=len(arrivals) % 3,
    )  # fmt: skip
    watch = Watch(driver)
    for number, (num_steps, size, priority, family) in enumerate(arrivals):
        for _ in range(num_steps):
            watch.step()
        watch.step([request(number, size, priority, family)])
    while driver.scheduler.has_work:
        watch.step()
    driver.check_idle()
    return watch


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 6), st.sampled_from([0, 0, 1, 4, 15]), st.sampled_from([0, 0, 1, 9]), st.integers(0, 2)),
    min_size=20,
    max_size=60,
)


@pytest.mark.parametrize("policy", WITH_KEYS)
@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(arrivals=ARRIVALS, num_rows=st.integers(1, 3))
def test_nobody_goes_before_one_that_has_waited_for_long(
    policy: str, arrivals: list[tuple[int, int, int, int]], num_rows: int
) -> None:
    assert play(policy, arrivals, num_rows).overtaken == []


ENDLESS = [*[(0, 1, 0, 0)] * 12, (0, 15, 9, 1), *[(2, 1, 0, 0)] * 40]
"""A request of every disadvantage, and a stream of requests that all policies like better."""


@pytest.mark.parametrize("policy", WITH_KEYS)
def test_the_bound_is_what_prevents_it(policy: str) -> None:
    assert play(policy, ENDLESS, 1, FOREVER).overtaken
    assert not play(policy, ENDLESS, 1).overtaken


def test_a_preempted_request_does_not_wait_anew_each_time() -> None:
    """What it waited before counts. Once it has waited for long enough, its row is not taken any more."""
    arrivals = [(0, 30, 9, 0), *[(8, 1, 0, 0)] * 40]
    watch = play("priority", arrivals, 1)
    assert watch.driver.scheduler.totals.num_preemptions > 1
    order = [name for name, _ in watch.driver.finished]
    assert 3 < order.index("0") < 20
    order = [name for name, _ in play("priority", [(0, 30, 9, 0), *[(4, 1, 0, 0)] * 40], 1, FOREVER).driver.finished]
    assert order[-1] == "0"


# --- fair: between tenants


@dataclass
class Shares:
    """Counts the service that each tenant has had, per weight, while all of them have something waiting."""

    driver: Driver
    weights: dict[str, float]
    had: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    worst: float = 0.0  # difference over an interval in which both waited throughout
    _admitted: set[str] = field(default_factory=set)
    _since: dict[tuple[str, str], float] = field(default_factory=dict)

    def step(self) -> None:
        driver = self.driver
        driver.now += 1.0
        num_before, num_outputs = len(driver.steps), {name: len(out) for name, out in driver.outputs.items()}
        driver.step()
        for (name, idx), output in driver.outputs.items():
            tenant = driver.added[name][0].tenant
            self.had[tenant] += 2 * (len(output) - num_outputs.get((name, idx), 0)) / self.weights[tenant]
        for step in driver.steps[num_before:]:
            assert step.record is not None
            for each in step.record.admitted:
                if each.request_id in self._admitted:
                    continue  # computed again because its row was taken: not the tenant's doing
                self._admitted.add(each.request_id)
                tenant = driver.added[each.request_id][0].tenant
                self.had[tenant] += (each.num_tokens - each.num_reused_tokens) / self.weights[tenant]
        waiting = {each.tenant for each in driver.scheduler.waiting.tenants()}
        for one in self.weights:
            for other in self.weights:
                ahead = self.had[one] - self.had[other]
                if {one, other} <= waiting:
                    self._since[one, other] = min(self._since.get((one, other), ahead), ahead)
                    self.worst = max(self.worst, ahead - self._since[one, other])
                else:
                    self._since.pop((one, other), None)


NUM_ROWS, LONGEST_PROMPT, LONGEST_OUTPUT = 3, 24, 30
TENANTS = st.lists(
    st.tuples(
        st.sampled_from([0.5, 1.0, 3.0]),
        st.lists(st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, LONGEST_OUTPUT)), min_size=1, max_size=25),
    ),
    min_size=2,
    max_size=4,
)


def share(tenants: list[tuple[float, list[tuple[int, int]]]], policy: str) -> Shares:
    """Each tenant comes with all its requests at once, five steps after the one before."""
    driver = Driver(
        make_limits(max_num_seqs=NUM_ROWS, num_pages=256, page_size=4), scheduling_policy=policy,
        max_policy_delay=FOREVER, enable_prefix_caching=False, max_num_queued_seqs=1 << 16,
    )  # fmt: skip
    shares = Shares(driver, {f"{i}": weight for i, (weight, _) in enumerate(tenants)})
    for i, (weight, sizes) in enumerate(tenants):
        for j, (num_prompt, num_outputs) in enumerate(sizes):
            driver.add(make_request(f"{i}-{j}", [i] * num_prompt, num_outputs, tenant=f"{i}", weight=weight))
        for _ in range(5):
            if driver.scheduler.has_work:
                shares.step()
    while driver.scheduler.has_work:
        shares.step()
    return shares


def bound(weights: Iterable[float]) -> float:
    return 2 * max(LONGEST_PROMPT, 2 * NUM_ROWS * LONGEST_OUTPUT) / min(weights)


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(tenants=TENANTS)
def test_tenants_that_wait_have_had_almost_equal_service(tenants: list[tuple[float, list[tuple[int, int]]]]) -> None:
    shares = share(tenants, "fair")
    assert shares.worst <= bound(shares.weights.values())


def test_turns_alone_do_not_give_equal_service() -> None:
    tenants = [(1.0, [(24, 30)] * 40), (1.0, [(1, 1)] * 40), (3.0, [(24, 30)] * 40)]
    fair, turns = share(tenants, "fair"), share(tenants, "fcfs")
    assert fair.worst <= bound([1.0]) < turns.worst


class Sybils:
    """A tenant that has had much, and new ones who come for ever, each with one request."""

    def __init__(self, delay: float) -> None:
        self.driver = Driver(
            make_limits(max_num_seqs=1, num_pages=256), scheduling_policy="fair", max_policy_delay=delay,
            pipeline_depth=0,
        )  # fmt: skip
        self.order: list[str] = []

    def run(self, num_steps: int) -> None:
        driver = self.driver
        for i in range(num_steps):
            if i % 3 == 0:
                driver.add(make_request(f"new{i}", [i], 4, tenant=f"new{i}"))
            if i == 30:
                driver.add(make_request("much", [1] * 20, 40, tenant="much"))
                driver.add(make_request("more", [1] * 20, 4, tenant="much"))
            driver.now += 1.0
            driver.step()


def test_a_tenant_has_a_turn_in_time_however_many_others_come() -> None:
    patient, impatient = Sybils(FOREVER), Sybils(PATIENCE)
    patient.run(400)
    impatient.run(400)
    assert ("more", 0) not in patient.driver.finished
    assert ("more", 0) in impatient.driver.finished
