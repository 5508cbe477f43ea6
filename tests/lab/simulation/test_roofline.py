"""The roofline of a step equals the planner's, which is counted layer by layer."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bench.shapes_folder import shape_folder
from penstock.config import Config, ConfigError
from penstock.lab.planning.costs import Costs
from penstock.lab.planning.machines import load_machines
from penstock.lab.planning.plan import Layout, Plan
from penstock.lab.simulation.device import StepShape
from penstock.lab.simulation.roofline import RooflineDevice
from penstock.lab.simulation.study import planned_machine
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import parse_model_config

MACHINES = load_machines()
SHAPES = ("llama-3.1-8b", "gemma-3-1b", "moe-8x2-0.5b")


def plan_of(shape: str, machine: str = "h100", tp: int = 1) -> Plan:
    decoder = parse_model_config(json.loads((shape_folder(shape) / "config.json").read_text()))
    assert isinstance(decoder, Decoder)
    return Plan(Costs(decoder), MACHINES[machine], Layout(tp))


PLANS = [plan_of(shape, machine, tp) for shape in SHAPES for machine, tp in (("h100", 1), ("a100", 2))]
POSITION = st.integers(0, 3000)
CHUNKS = st.lists(st.tuples(POSITION, st.integers(2, 2000)), max_size=4)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(PLANS), st.lists(POSITION, min_size=1, max_size=40), CHUNKS)
def test_a_step_takes_as_long_as_counting_it_says(
    plan: Plan, decodes: list[int], chunks: list[tuple[int, int]]
) -> None:
    rows = [*((position, 1) for position in decodes), *chunks]
    expected = plan.step_of(rows).seconds
    assert RooflineDevice(plan).seconds(StepShape(decodes, chunks)) == pytest.approx(expected)
    assert RooflineDevice(plan, 0.5).seconds(StepShape(decodes, chunks)) == pytest.approx(2 * expected)


def test_plain_steps_are_those_of_the_plan() -> None:
    plan = PLANS[0]
    device = RooflineDevice(plan)
    assert device.seconds(StepShape([1023] * 16, [])) == pytest.approx(plan.decode_step(16, 1024).seconds)
    assert device.seconds(StepShape([], [(0, 2048)])) == pytest.approx(plan.prefill(2048).seconds)


def test_the_pool_is_what_the_plan_leaves() -> None:
    plan = plan_of("llama-3.1-8b")
    hello = planned_machine(plan, 1.0).hello(Config())
    assert hello.num_pages == int(plan.ledger.left / plan.costs.kv_bytes_per_token) // 16
    assert hello.page_bytes == 16 * 128 * 1024
    with pytest.raises(ConfigError, match="does not fit"):
        planned_machine(plan._replace(machine=replace(plan.machine, memory=9e9)), 1.0)
