"""What each scheduling policy claims, on the load that it is made for, in virtual time."""

import random
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from penstock.lab.simulation.arrivals import Arrival
from penstock.lab.simulation.device import Timing
from penstock.lab.simulation.fit import FittedDevice, Spread
from penstock.lab.simulation.simulator import Simulator
from penstock.lab.simulation.study import Load, Machine
from penstock.parts.policies.scheduler.registry import POLICIES
from tests.core.driver import make_config
from tests.lab.simulation.policy_scenarios import SCENARIOS, Scenario, Served

AS_EXPECTED = Spread((1.0,), (0.0,))
DEVICE = FittedDevice((4e-4, 3e-5, 1.5e-7, 2e-4, 4.5e-5, 2e-8), AS_EXPECTED, AS_EXPECTED, (5e-5,), (5e-5,), 0.0)
TIMING = Timing(request=2e-3, reply=5e-4, scheduler=1e-4, transport=3e-4)
MACHINE = Machine("made up", DEVICE, TIMING, 16384, 2048, 4080)
BEGINS = 4.0
"""Seconds after which a load begins: what came before has told the policy how long answers are."""


def warm_up() -> list[Arrival]:
    """Requests of all kinds of lengths, for what a policy must have seen."""
    rng = random.Random(1)
    return [
        Arrival(time=0.05 * i, input_len=rng.choice((32, 128, 400, 800, 1536)), output_len=rng.choice((2, 8, 32)))
        for i in range(24)
    ]


def simulate(policy: str, arrivals: Sequence[Arrival], num_pages: int) -> list[Served]:
    """A load after the warm-up, with 8 rows and steps of 512 tokens."""
    early = warm_up()
    both = [*early, *(replace(each, time=each.time + BEGINS) for each in arrivals)]
    config = make_config(max_num_seqs=8, max_num_batched_tokens=512, queue_patience=0.0, scheduling_policy=policy)
    hello = replace(MACHINE.hello(config), num_pages=num_pages)
    requests = Load(both, seed=0).requests(MACHINE)
    run = Simulator(config, hello, MACHINE.device, MACHINE.timing, both, requests, seed=0).run()
    return [
        Served(arrival, 0.0 if o.error else o.ttft, 0.0 if o.error else o.e2e, o.num_cached, o.error)
        for arrival, o in zip(both, run.outcomes, strict=True)
    ][len(early) :]


def test_every_policy_but_the_first_come_first_served_has_a_claim() -> None:
    with_claims = {scenario.policy for scenario in SCENARIOS} | {"deadline-refuse"}  # its order is that of deadline
    assert with_claims == set(POLICIES) - {"fcfs"}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: f"{scenario.policy} beside {scenario.baseline}")
def test_claims_hold_in_virtual_time(scenario: Scenario) -> None:
    def capacity(arrivals: Sequence[Arrival]) -> float:
        served = simulate("fcfs", arrivals, scenario.num_pages)
        assert not any(each.error for each in served)
        return len(served) / max(each.e2e for each in served)

    figures = {}
    for run in scenario.make(random.Random(0), capacity, 8.0):
        policy = "fair" if run.policy == "alone" else run.policy
        figures[run.policy] = scenario.figure(simulate(policy, run.arrivals, scenario.num_pages))
    assert list(figures)[-1] == scenario.policy
    assert scenario.ratio(figures[scenario.baseline], figures[scenario.policy]) >= scenario.target


def test_ratios_are_above_one_where_the_policy_is_better() -> None:
    by_policy = {scenario.policy: scenario for scenario in SCENARIOS}
    assert by_policy["sjf"].ratio(2.0, 1.0) == 2.0
    assert by_policy["cache-aware"].ratio(0.2, 0.6) == pytest.approx(3.0)
    assert by_policy["cache-aware"].ratio(0.0, 0.6) == 0.0
    served = [Served(Arrival(time=0, input_len=100, output_len=1), 0.1 * i, 0.2 * i, 50, "") for i in range(1, 11)]
    failed = Served(Arrival(time=0, input_len=100, output_len=1), 0.0, 0.0, 0, "HTTP 429")
    assert by_policy["cache-aware"].figure([*served, failed]) == 0.5
    assert by_policy["sjf"].figure([*served, failed]) == pytest.approx(1.1)
    assert by_policy["deadline"].figure([*served, failed]) == pytest.approx(5 / 11)
