"""The description of a measured machine, and what is made of it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import ConfigError
from penstock.lab.planning import verify as verifying
from penstock.lab.planning.costs import Costs
from penstock.lab.planning.machines import Machine
from penstock.lab.planning.plan import Layout, Plan
from penstock.lab.planning.plot import draw
from penstock.lab.planning.requests import (
    Loaded,
    LoadModel,
    MeasurePace,
    Measurer,
    Memory,
    Ran,
    Remeasure,
    Request,
    Run,
)
from penstock.lab.planning.step_costs import (
    KNOTS,
    PARTS,
    Pace,
    StepCosts,
    amounts,
    describe,
    fit,
    nonnegative_least_squares,
)
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import parse_model_config
from tests.lab.planning.published_steps import llama

ROOT = Path(__file__).parents[3]


def decoder(num_layers: int = 4, hidden: int = 256, inner: int = 512, **more: Any) -> Decoder:
    found = parse_model_config(llama(num_layers, hidden, inner, 8) | {"head_dim": 64, "vocab_size": 2048} | more)
    assert isinstance(found, Decoder)
    return found


def machine(seconds: dict[str, float] | None = None) -> Machine:
    each = dict.fromkeys(PARTS, 1e-11) | {"step": 5e-5, "layer": 1e-6} | (seconds or {})
    steps = StepCosts(seconds=tuple(each[part] for part in PARTS), cache=32e6, bytes_per_weight=2)
    return Machine(
        name="desk", memory=16e9, bandwidth=4e10, link=4e10, flops={"fp16": 5e11}, runtime=3e8, most=1, steps=steps
    )


def test_what_a_step_has() -> None:
    model = decoder(num_key_value_heads=2)
    chunks = Counter([(9, 1), (9, 1), (0, 64)])
    found = dict(zip(PARTS, amounts(model, chunks, 1e12).tolist(), strict=True))
    assert [found[part] for part in ("step", "layer", "row", "prompt", "logit")] == [1, 4, 3, 1, 3 * 2048]
    assert found["cached@kept"] == 2 * 10 * 4 * 2 * 2 * 64
    assert found["pair"] == 2 * 10 * 4 * 8 * 2 * 64
    assert found["prompt_pair"] == 64 * 65 / 2 * 4 * 8 * 2 * 64
    head = 2048 * 256
    others = model.num_step_weights - head
    assert found["cached@64"] == pytest.approx(others * (128 - 66) / 64)
    assert found["cached@128"] == pytest.approx(others * (66 - 64) / 64)
    assert found["cached@2"] + found["cached@4"] == pytest.approx(head)
    assert not any(found[part] for part in PARTS if part.startswith("streamed"))
    gone = dict(zip(PARTS, amounts(model, chunks, 1000).tolist(), strict=True))
    assert (gone["streamed@64"], gone["cached@64"]) == (found["cached@64"], 0)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_a_fit_finds_what_the_steps_were_made_of(seed: int) -> None:
    rng = np.random.default_rng(seed)
    true = rng.uniform(0.5, 2, len(PARTS)) * [1e-5 if part in ("step", "layer") else 1e-10 for part in PARTS]
    true[rng.random(len(PARTS)) < 0.2] = 0.0
    shapes = [
        decoder(layers, hidden, 2 * hidden, num_key_value_heads=kv, vocab_size=vocab)
        for layers, hidden, kv, vocab in ((1, 64, 8, 512), (24, 64, 1, 512), (2, 256, 4, 8192), (6, 512, 2, 512))
    ]
    steps, models, seconds = [], [], []
    for model in shapes:
        for count in (*KNOTS, 700, 3, 24):
            for chunks in (Counter({(0, count): 1}), Counter({(int(rng.integers(1, 2000)), 1): count})):
                steps.append(chunks)
                models.append(model)
                seconds.append(float(amounts(model, chunks, 2e6) @ true))
    found = fit(models, steps, np.array(seconds), 2e6)
    assert (found >= 0).all()
    for model, chunks, expected in zip(models, steps, seconds, strict=True):
        assert amounts(model, chunks, 2e6) @ found == pytest.approx(expected, rel=1e-3)


@given(st.integers(0, 2**32 - 1))
def test_nothing_negative_is_found(seed: int) -> None:
    """The conditions of Karush, Kuhn and Tucker: no x >= 0 is better."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(12, 6)), rng.normal(size=12)
    x = nonnegative_least_squares(a, b)
    gradient = a.T @ (a @ x - b)
    assert (x >= 0).all()
    assert (gradient >= -1e-6).all()
    assert np.abs(gradient[x > 0]).max(initial=0) < 1e-6


def test_plans_for_a_measured_machine() -> None:
    model = decoder()
    plan = Plan(Costs(model), machine())
    assert plan.is_measured
    steps = plan.machine.steps
    assert steps is not None
    assert plan.decode_step(3, 100).seconds == steps.of_step(model, {(99, 1): 3})[0]
    assert plan.step_of([(99, 1)] * 3) == plan.decode_step(3, 100)
    assert plan.decode_step(1, 10).bound_by == "host"
    assert plan.prefill(4096).bound_by == "compute"
    assert plan.ledger_of(64).runtime_bytes == 3e8
    for other in (plan._replace(costs=Costs(model, "int8")), plan._replace(layout=Layout(tp=2))):
        assert not other.is_measured
        assert other.decode_step(1, 10).bound_by == "memory", "of other formats and layouts the roofline is known"
    assert describe(steps)["weight_bytes_per_second"] == pytest.approx(2 / 1e-11)


class FakeMeasurer:
    """Answers what was predicted, times a factor, and counts."""

    factor, resident = 1.1, 1.0
    model: Decoder
    asked: list[Request]

    def __enter__(self) -> "FakeMeasurer":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, request: Request, answer: type[Any]) -> Any:
        self.asked.append(request)
        if isinstance(request, Remeasure):
            return machine()
        if isinstance(request, MeasurePace):
            return Pace()
        if isinstance(request, Memory):
            return int(self.resident)
        if isinstance(request, LoadModel):
            return Loaded("cpu", "bfloat16", 1.0)
        assert isinstance(request, Run)
        plan = Plan(Costs(self.model), machine())
        steps = [[(0, request.context)]] * request.batch + [[(request.context, 1)] * request.batch]
        return Ran([(step, self.factor * plan.step_of(step).seconds) for step in steps])


def test_verifying(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeMeasurer.model, FakeMeasurer.asked = decoder(), []
    monkeypatch.setattr(verifying, "Measurer", FakeMeasurer)
    plan = Plan(Costs(FakeMeasurer.model), machine())
    rows = verifying.verify(plan, Path("somewhere"))
    assert {row.what.split(",")[0] for row in rows} == {"prefill", "decode", "memory"}
    assert len(rows) > 8
    for row in rows[:-1]:
        assert row.error == pytest.approx(1 / 1.1 - 1)
    load = next(request for request in FakeMeasurer.asked if isinstance(request, LoadModel))
    pool = load.options["cpu_kv_cache_gib"] * 2**30
    assert rows[-1].predicted > pool + plan.costs.weight_bytes + 3e8
    assert sum(isinstance(request, Remeasure) for request in FakeMeasurer.asked) == 1
    runs = [request for request in FakeMeasurer.asked if isinstance(request, Run)]
    assert runs.count(runs[1]) >= 5, "in several rounds"


def test_a_machine_that_changes_its_pace_is_predicted_at_that_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slower(FakeMeasurer):
        factor = 1.0

        def ask(self, request: Request, answer: type[Any]) -> Any:
            if isinstance(request, MeasurePace):
                return Pace(1.5, 1.5)
            found = super().ask(request, answer)
            return Ran([(chunks, 1.5 * seconds) for chunks, seconds in found.steps]) if answer is Ran else found

    Slower.model, Slower.asked = decoder(), []
    monkeypatch.setattr(verifying, "Measurer", Slower)
    for row in verifying.verify(Plan(Costs(Slower.model), machine()), Path("somewhere"))[:-1]:
        assert row.error == pytest.approx(0.0), row.what


def test_a_model_is_loaded_and_run_in_the_process_that_measures() -> None:
    with Measurer() as measurer:
        with pytest.raises(ConfigError, match="no model is loaded"):
            measurer.ask(Run(1, 8, 2), Ran)
        options = {"device": "cpu", "max_model_len": 256, "cpu_kv_cache_gib": 0.01, "max_num_batched_tokens": 256}
        loaded = measurer.ask(LoadModel(str(ROOT / "bench/shapes/tiny"), options), Loaded)
        assert loaded.device.startswith("cpu")
        ran = measurer.ask(Run(2, 64, 3), Ran)
        assert sum(count for chunks, _ in ran.steps[:-1] for _, count in chunks if count > 1) == 2 * 64
        chunks, seconds = ran.steps[-1]
        assert [count for _, count in chunks] == [1, 1]
        assert 64 <= chunks[0][0] <= 66
        assert 0 < seconds < 10
        assert 50e6 < measurer.ask(Memory(), int) < 5e9
        with pytest.raises(ConfigError, match="nowhere"):
            measurer.ask(LoadModel("nowhere", {}), Loaded)


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = Plan(Costs(decoder()), machine())
    for name, begins in (("plan.svg", b"<?xml"), ("plan.png", b"\x89PNG")):
        draw(plan, 512, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(begins)
    with pytest.raises(ConfigError, match=r"--plot .*plan\.txt"):
        draw(plan, 512, tmp_path / "plan.txt")


def test_descriptions_survive_a_file() -> None:
    import msgspec

    told = msgspec.json.encode(machine())
    assert msgspec.json.decode(told, type=Machine) == machine()
    assert len(json.loads(told)["steps"]["seconds"]) == len(PARTS)


def test_only_waits_for_memory_change_with_its_pace() -> None:
    count = 1 + len(KNOTS)
    plain = [1.0] * (len(PARTS) - 2 * count)
    cached, streamed = [2.0] * (count - 1) + [100.0], [6.0] * (count - 1) + [130.0]
    costs = StepCosts(seconds=(*plain, *cached, *streamed), cache=1e6, bytes_per_weight=2.0)
    assert costs.at_pace(Pace()) == costs
    for streaming, one, many in ((0.5, 3.0, 127.0), (1.5, 9.0, 133.0), (0.1, 2.0, 126.0)):
        found = costs.at_pace(Pace(1.0, streaming)).seconds
        assert found[:-count] == costs.seconds[:-count]
        assert found[-count:] == pytest.approx([one] * (count - 1) + [many]), streaming
    assert costs.at_pace(Pace(2.0, 2.0)).seconds[: -count - 1] == tuple(
        2 * each for each in costs.seconds[: -count - 1]
    )


def test_without_waits_for_memory_only_computing_counts() -> None:
    costs = StepCosts(seconds=(1.0,) * len(PARTS), cache=1e6, bytes_per_weight=2.0)
    assert set(costs.at_pace(Pace(2.0, 1.0)).seconds) == {2.0}
