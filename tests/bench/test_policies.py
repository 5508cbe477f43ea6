"""The policies' claims, on their loads in virtual time, and what a run of the benchmark leaves."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.scheduling.policies import draw, simulate
from bench.scheduling.policy_scenarios import SCENARIOS, Scenario, Served
from penstock.lab.simulation.arrivals import Arrival
from penstock.lab.simulation.device import Timing
from penstock.lab.simulation.fit import FittedDevice, Spread
from penstock.lab.simulation.study import Machine
from penstock.parts.policies.scheduler.registry import POLICIES

AS_EXPECTED = Spread((1.0,), (0.0,))
DEVICE = FittedDevice((4e-4, 3e-5, 1.5e-7, 2e-4, 4.5e-5, 2e-8), AS_EXPECTED, AS_EXPECTED, (5e-5,), (5e-5,), 0.0)
TIMING = Timing(request=2e-3, reply=5e-4, scheduler=1e-4, transport=3e-4)
MACHINE = Machine("made up", DEVICE, TIMING, 16384, 2048, 4080)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: f"{scenario.policy} beside {scenario.baseline}")
def test_claims_hold_in_virtual_time(scenario: Scenario) -> None:
    if scenario.policy not in POLICIES:
        pytest.skip("there is no such policy")

    def capacity(arrivals: Sequence[Arrival]) -> float:
        served = simulate(MACHINE, "fcfs", arrivals, scenario.flags, 0)
        assert not any(each.error for each in served)
        return len(served) / max(each.e2e for each in served)

    figures = {}
    for run in scenario.make(random.Random(0), capacity, 8.0):
        policy = "fair" if run.policy == "alone" else run.policy
        served = simulate(MACHINE, policy, run.arrivals, scenario.flags, 0)
        figures[run.policy] = scenario.figure(served)
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


def test_the_plot_has_a_panel_for_each_scenario(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    its = {"ratio": 1.5, "e2e_s": {"fcfs": [(0.5, 1.0), (1.0, 2.0)], "sjf": [(1.0, 0.5)]}, "ttft_s": {}}
    found = {"policy": "sjf", "claim": "mean latency", "num_requests": 2, "measured": its, "simulated": its}
    draw({"scenarios": [found] * 3}, tmp_path / "policies.svg")
    text = (tmp_path / "policies.svg").read_text()
    assert text.count("ratio measured / simulated: 1.50 / 1.50") == 3
