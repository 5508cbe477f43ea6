"""Fits: they find the costs that made a trace, and simulations with them agree with those that they were fitted to."""

import json
import random
import statistics
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.config import ConfigError
from penstock.lab.simulation.arrivals import Arrival, Bursts, Shape, Targets, draw
from penstock.lab.simulation.device import StepShape, Timing, frontend_waits
from penstock.lab.simulation.figures import figures
from penstock.lab.simulation.fit import FittedDevice, MeasuredStep, Spread, fit_device, fit_timing
from penstock.lab.simulation.recordings import Delays
from penstock.lab.simulation.step_traces import read_trace
from penstock.lab.simulation.study import Machine, Measured, measured, with_clients
from penstock.parts.recording.scheduler.step_trace import StepTrace
from tests.lab.simulation.loads import KnownDevice, machine, simulator

AS_EXPECTED = Spread((1.0,), (0.0,))
WEIGHTS = (1e-3, 1e-4, 2e-7, 5e-5, 3e-5, 1e-8)


def steps_of(weights: tuple[float, ...], count: int, noise: float, freaks: int = 0) -> list[MeasuredStep]:
    rng = random.Random(1)
    true = FittedDevice(weights, AS_EXPECTED, AS_EXPECTED, (0.0,), (0.0,), 0.0)
    found = []
    for i in range(count):
        decodes = [rng.randrange(2000) for _ in range(rng.randrange(1, 33))]
        chunks = [(rng.randrange(1000), rng.randrange(2, 500)) for _ in range(rng.randrange(3) if i % 3 == 0 else 0)]
        shape = StepShape(decodes, chunks)
        seconds = true.expected(shape) * rng.uniform(1 - noise, 1 + noise)
        found.append(MeasuredStep(shape, seconds * (10 if i < freaks else 1), 1e-4, i * 1.0, i + 1.5))
    random.Random(2).shuffle(found)
    return found


def test_exact_costs_are_found() -> None:
    fitted = fit_device(steps_of(WEIGHTS, 300, 0.0))
    assert fitted.weights == pytest.approx(WEIGHTS, rel=1e-3)
    assert fitted.error < 1e-4


def test_costs_are_found_among_steps_that_vary_and_some_that_stood_still() -> None:
    fitted = fit_device(steps_of(WEIGHTS, 2000, 0.2, 40))
    true = FittedDevice(WEIGHTS, AS_EXPECTED, AS_EXPECTED, (0.0,), (0.0,), 0.0)
    for shape in (StepShape([500], []), StepShape([800] * 30, []), StepShape([100] * 8, [(0, 400)])):
        assert fitted.expected(shape) == pytest.approx(true.expected(shape), rel=0.03)


def test_simulated_steps_vary_as_the_recorded_ones_did() -> None:
    steps = steps_of(WEIGHTS, 4000, 0.3)
    fitted = fit_device(steps)
    simulated = list(map(fitted.walk(0).seconds, [step.shape for step in steps]))
    actual = [step.forward for step in steps]
    assert np.mean(simulated) == pytest.approx(np.mean(actual), rel=0.02)
    for spread in (fitted.decode_spread, fitted.chunk_spread):
        assert np.percentile(spread.ratios, (1, 50, 99)) == pytest.approx((0.71, 1.0, 1.29), abs=0.03)


def test_a_step_that_stood_still_stands_still_for_as_long_whatever_its_length() -> None:
    steps = steps_of(WEIGHTS, 400, 0.0)
    short = min(range(200, 400), key=lambda i: steps[i].forward if steps[i].shape.chunks else 1.0)
    long = max(steps, key=lambda step: step.forward)
    steps[short] = steps[short]._replace(forward=steps[short].forward + 0.25)
    fitted = fit_device(steps)
    walk = fitted.walk(0)
    simulated = [walk.seconds(long.shape) for _ in range(400)]
    assert max(simulated) == pytest.approx(1.5 * long.forward + 0.25, rel=0.05)


def test_each_slow_chunk_of_the_recording_comes_once() -> None:
    """Between two chunks there are many decodes, and those do not let a stall of one chunk last for others."""
    weights = (1e-3, 0.0, 0.0, 0.0, 1e-5, 0.0)
    decode, chunk = StepShape([5], []), StepShape([], [(0, 100)])
    shapes = ([decode] * 20 + [chunk]) * 50
    true = FittedDevice(weights, AS_EXPECTED, AS_EXPECTED, (0.0,), (0.0,), 0.0)
    steps = [MeasuredStep(shape, true.expected(shape), 1e-4, i * 1.0, i + 1.5) for i, shape in enumerate(shapes)]
    stalled = steps[629]
    assert stalled.shape is chunk
    steps[629] = stalled._replace(forward=stalled.forward + 0.25)
    walk = fit_device(steps).walk(1)
    seconds = list(map(walk.seconds, shapes))
    assert sum(each > 0.1 for each in seconds) == 1


def test_steps_with_chunks_have_gaps_of_their_own() -> None:
    decode, chunk = StepShape([5], []), StepShape([5], [(0, 100)])
    shapes = ([decode] * 4 + [chunk]) * 10
    gaps = ([1e-3] + [1e-4] * 3 + [1e-3]) * 10
    steps = [
        MeasuredStep(shape, 1e-2, gap, i * 1e-2, (i + 1.5) * 1e-2)
        for i, (shape, gap) in enumerate(zip(shapes, gaps, strict=True))
    ]
    walk = fit_device(steps).walk(0)
    assert [walk.gap(shape) for shape in shapes[1:]] == gaps[1:]


def test_no_part_costs_less_than_nothing() -> None:
    steps = [step._replace(forward=1e-3 / len(step.shape.decodes)) for step in steps_of(WEIGHTS, 100, 0.0)]
    assert min(fit_device(steps).weights) >= 0


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        fit_device(steps_of(WEIGHTS, 12, 0.0))


LOADS = {
    "steady": (Bursts(rate=12.0), Shape(input_len=(20, 300), output_len=(10, 80))),
    "bursty": (Bursts(rate=10.0, burstiness=0.2), Shape(input_len=(20, 300), output_len=(10, 80))),
    "shared": (Bursts(rate=14.0), Shape(input_len=(220, 400), output_len=(10, 60), prefix_len=192, num_prefixes=4)),
}
TIMING = Timing(request=2e-3, frontend=8e-4, reply=1e-3, scheduler=1e-4, transport=4e-4)
DEVICE = KnownDevice(spread=0.15, between=3e-4)


def figures_of(name: str, on: Machine) -> dict[str, float]:
    """Of one load, over two runs whose slow steps are others."""
    arrivals = draw(400, *LOADS[name], seed=2)
    runs = [figures(simulator(arrivals, on, seed=seed).run(), arrivals, 1, Targets()) for seed in range(2)]
    found = {"tokens/s": [run["output_tokens_per_s"] for run in runs], "hits": [1 + run["hit_rate"] for run in runs]}
    for figure in ("ttft_ms", "tpot_ms"):
        for share in ("p50", "p99"):
            found[f"{figure} {share}"] = [run[figure][share] for run in runs]
    return {name: statistics.mean(values) for name, values in found.items()}


def test_what_is_fitted_to_one_run_predicts_others(tmp_path: Path) -> None:
    """The whole chain on a worker whose costs are known: a trace is written, fitted, and judged on other loads."""
    path = tmp_path / "steps.jsonl"
    trace = StepTrace(str(path))
    true = machine(DEVICE, TIMING)
    arrivals = draw(500, *LOADS["steady"], seed=1)
    outcomes = simulator(arrivals, true, trace=trace).run().outcomes
    delays = [Delays(each.ttft, each.e2e) for each in outcomes]
    trace.close()
    known = measured(path)
    assert known.machine.timing.transport == pytest.approx(TIMING.transport, rel=0.1)
    assert known.machine.timing.scheduler == pytest.approx(TIMING.scheduler, rel=0.1)
    way = TIMING.request + TIMING.reply
    sent = [each.time for each in arrivals]
    waits = frontend_waits(sent, TIMING.frontend)
    at_scheduler = [
        Delays(first - way - wait, last - way - wait) for (first, last), wait in zip(delays, waits, strict=True)
    ]
    arrived = [msgspec.structs.replace(each, time=each.time + wait) for each, wait in zip(arrivals, waits, strict=True)]
    fitted = with_clients(known._replace(arrivals=arrived, delays=at_scheduler), sent, delays)
    assert fitted.timing.frontend == pytest.approx(TIMING.frontend, rel=0.1)
    assert fitted.timing.request + fitted.timing.reply == pytest.approx(way)
    assert fitted.timing.first == pytest.approx(0.0)
    for name in LOADS:
        predicted, actual = figures_of(name, fitted), figures_of(name, true)
        for figure, value in actual.items():  # few requests make a p99
            assert predicted[figure] == pytest.approx(value, rel=0.15 if "p99" in figure else 0.04), (name, figure)


def test_first_tokens_have_a_longer_way_to_clients_than_others() -> None:
    at_scheduler = [Delays(0.01 * i, 0.02 * i) for i in range(40)]
    at_clients = [Delays(first + 4e-3, last + 3e-3) for first, last in at_scheduler]
    arrivals = [Arrival(time=i + 0.7, input_len=20, output_len=9) for i in range(40)]
    known = Measured(machine(DEVICE, TIMING), [], arrivals, at_scheduler, 16)
    timing = with_clients(known, range(40), at_clients).timing
    assert (timing.request, timing.reply, timing.first) == pytest.approx((2e-3, 1e-3, 1e-3))
    arrivals = [Arrival(time=0.0, input_len=20, output_len=length) for length in (1, 2, 40)]
    for first in (1e-3, -1e-3):
        slow, quick = (
            simulator(arrivals, machine(DEVICE, msgspec.structs.replace(TIMING, reply=2e-3, first=each))).run().outcomes
            for each in (first, 0.0)
        )
        for its, other in zip(slow, quick, strict=True):
            assert its.ttft - other.ttft == pytest.approx(first)
            assert its.ended >= its.sent + its.ttft
        assert slow[2].ended == quick[2].ended


def test_requests_that_overlap_share_the_frontend() -> None:
    assert frontend_waits([0.0, 1e-3, 1e-3, 9e-3], 2e-3) == pytest.approx([2e-3, 3e-3, 3e-3, 0.0])
    assert frontend_waits([5e-3, 4e-3], 2e-3) == pytest.approx([1e-3, 1e-3])
    assert frontend_waits([], 2e-3) == []
    arrivals = [Arrival(time=0.0, input_len=20, output_len=1) for _ in range(3)]
    shared = msgspec.structs.replace(TIMING, frontend=0.5)
    (alone, *_), together = (simulator(arrivals[:count], machine(DEVICE, shared)).run().outcomes for count in (1, 3))
    assert [each.ttft - alone.ttft for each in together] == pytest.approx([1.0] * 3, rel=0.01)


def test_what_is_sent_while_the_scheduler_wakes_joins_the_plan() -> None:
    arrivals = [Arrival(time=time, input_len=20, output_len=1) for time in (0.0, 2e-4)]
    for wake, steps in ((1e-4, 2), (3e-4, 1)):
        timing = msgspec.structs.replace(TIMING, frontend=0.0, wake=wake)
        run = simulator(arrivals, machine(DEVICE, timing)).run()
        assert run.totals.num_steps == steps


def test_a_trace_shows_its_requests(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    trace = StepTrace(str(path))
    arrivals = [
        Arrival(time=0.0, input_len=70, output_len=20),
        Arrival(time=0.5, input_len=10, output_len=1),
        Arrival(time=1.0, input_len=100, output_len=5, prefix_id="a", prefix_len=48),
        Arrival(time=1.5, input_len=100, output_len=5, prefix_id="a", prefix_len=48),
    ]
    simulator(arrivals, trace=trace).run()
    trace.close()
    found = read_trace(path)
    assert [(each.input_len, each.output_len, each.prefix_len) for each in found.arrivals] == [
        (70, 20, 0), (10, 1, 0), (100, 5, 0), (100, 5, 48),
    ]  # fmt: skip
    assert [each.time for each in found.arrivals] == pytest.approx([0.0, 0.5, 1.0, 1.5], abs=1e-3)
    assert found.num_pages == (1 << 16) // 16


@pytest.mark.parametrize("text", ["", "{}\n", "nothing\n", json.dumps({"step_id": 1}) + "\n"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigError, match="file"):
        read_trace(path)


def test_the_way_to_the_worker_is_seen_where_it_was_idle() -> None:
    alone = [MeasuredStep(StepShape([1], []), 1e-3, 5e-3, i, i + 1e-3 + 7e-4, 5e-5) for i in range(30)]
    assert fit_timing(alone).transport == pytest.approx(7e-4)
    assert fit_timing(alone).scheduler == pytest.approx(5e-5)


def test_a_worker_that_slept_wakes_first() -> None:
    """Two plans at once, then a pause: the second one finds the worker awake."""
    steps = []
    for i in range(30):
        steps.append(MeasuredStep(StepShape([1], []), 1e-3, 5e-3, i, i + 1e-3 + 7e-4))
        steps.append(MeasuredStep(StepShape([2], []), 1e-3, 1e-5, i + 1.5e-3, i + 1.5e-3 + 1e-3 + 3e-4))
    timing = fit_timing(steps)
    assert timing.transport == pytest.approx(3e-4)
    assert timing.wake == pytest.approx(4e-4)
    true = machine(DEVICE, TIMING)
    arrivals = [Arrival(time=0.1 * i, input_len=40, output_len=30) for i in range(3)]
    asleep = true._replace(timing=msgspec.structs.replace(TIMING, wake=5e-3))
    quick_run, slow_run = simulator(arrivals, true).run(), simulator(arrivals, asleep).run()
    for quick, slow in zip(quick_run.outcomes, slow_run.outcomes, strict=True):
        assert slow.ttft - quick.ttft == pytest.approx(5e-3)
        assert slow.tpot == pytest.approx(quick.tpot)
