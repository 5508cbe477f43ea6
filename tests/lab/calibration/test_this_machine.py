"""What this machine is found to be."""

import math
import os
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch

from penstock.lab.calibration import probes, this_machine
from penstock.lab.calibration.probes import CACHED, STREAMED, TINY, Probes, Shape
from penstock.lab.calibration.rates import device_rates
from penstock.lab.calibration.this_machine import known_gpu, this_cpu
from penstock.lab.calibration.timed_engine import TimedStep
from penstock.lab.planning.machines import Machine, load_machines
from penstock.lab.planning.step_costs import PARTS, StepCosts
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import parse_model_config


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GeForce RTX 3090", None),
        ("NVIDIA A10", None),
    ],
)
def test_gpus_by_their_names(name: str, expected: str | None) -> None:
    known = load_machines()
    assert known_gpu(name, known) == (None if expected is None else known[expected])


def test_rates_of_a_device() -> None:
    bandwidth, flops = device_rates(torch.device("cpu"), lambda: None, num_bytes=1 << 20, size=64)
    assert bandwidth > 1e6
    assert flops > 1e6


class FakeCpu:
    count = 0

    def __init__(self, num_threads: int) -> None:
        pass

    def measure(self) -> Machine:
        FakeCpu.count += 1
        steps = StepCosts(seconds=(1.0,) * len(PARTS), cache=1, bytes_per_weight=2)
        return Machine(name="m", memory=1, bandwidth=1, link=1, flops={"fp16": 1}, steps=steps, measured_at=time.time())


def test_a_description_is_kept_for_a_day_if_the_machine_was_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(this_machine, "ThisCpu", FakeCpu)
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0, 0))
    FakeCpu.count = 0
    this_cpu()
    this_cpu()
    assert (FakeCpu.count, list(tmp_path.iterdir())) == (2, [])
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0, 0))
    first = this_cpu()
    assert this_cpu() == first
    assert FakeCpu.count == 3
    assert this_cpu(again=True) != first
    [path] = tmp_path.iterdir()
    old = msgspec.structs.replace(this_cpu(), measured_at=time.time() - 25 * 3600)
    path.write_bytes(msgspec.json.encode(old))
    assert this_cpu().measured_at > old.measured_at
    path.write_text("{}")
    this_cpu()
    assert FakeCpu.count == 6


def test_made_up_models_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two that are quick, in few steps: every figure is there and none is negative."""
    runs = {TINY: [(1, 16, 4), (4, 16, 4)], CACHED: [(1, 16, 4), (2, 16, 4), (1, 128, 0)]}
    monkeypatch.setattr(probes, "_RUNS", runs)
    monkeypatch.setattr(probes, "_PROMPTS", (128,))
    monkeypatch.setattr(probes, "STREAMED", CACHED)
    made_up = Probes("bfloat16", device="cpu", num_threads=1)
    found = made_up.measure(32e6, 2.0)
    assert len(found.seconds) == len(PARTS)
    assert min(found.seconds) >= 0
    assert max(found.seconds) > 0
    # So few steps leave most parts at zero, so these say nothing but that both steps were run.
    pace = made_up.pace(found)
    assert 0 < pace.computing < math.inf
    assert 0 < pace.streaming < math.inf


def test_the_pace_is_the_time_of_two_steps_beside_their_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = StepCosts(seconds=tuple(1e-9 * (3 + part) for part in range(len(PARTS))), cache=32e6, bytes_per_weight=2.0)
    made_up = Probes("bfloat16")
    for shape in (CACHED, STREAMED):
        decoder = parse_model_config(shape.config("bfloat16"))
        assert isinstance(decoder, Decoder)
        made_up._decoders[shape] = decoder
    slower = {CACHED: 2.0, STREAMED: 3.0}

    class FakeEngine:
        def __init__(self, shape: Shape) -> None:
            self.shape = shape

        def best(self, batch: int, context: int, num_steps: int) -> list[TimedStep]:
            chunks = [(0, context)] * batch if not num_steps else [(context + num_steps // 2, 1)] * batch
            seconds, _ = costs.of_step(made_up._decoders[self.shape], Counter(chunks))
            return [TimedStep(chunks, slower[self.shape] * seconds)]

    monkeypatch.setattr(made_up, "load", FakeEngine)
    pace = made_up.pace(costs)
    assert (pace.computing, pace.streaming) == pytest.approx((2.0, 3.0))
