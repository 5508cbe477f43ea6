"""Devices of known speed, and simulations of small loads on them."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from penstock.config import WorkerOptions
from penstock.lab.simulation.arrivals import Arrival
from penstock.lab.simulation.device import Device, StepShape, Timing
from penstock.lab.simulation.simulator import Simulator
from penstock.lab.simulation.study import Load, Machine
from penstock.parts.recording.scheduler.step_trace import StepTrace
from tests.core.driver import make_config


class KnownDevice(NamedTuple):
    """Seconds of a step, of each decode, of each position in a context, of each token of a chunk."""

    step: float = 2e-3
    row: float = 1e-4
    context: float = 1e-6
    token: float = 5e-5
    between: float = 1e-4
    spread: float = 0.0  # the quickest step takes so much less than the mean, the slowest so much more
    overlaps_copies: bool = False
    stages: tuple[float, ...] = (1.0,)

    def walk(self, seed: int) -> "KnownWalk":
        return KnownWalk(self, random.Random(seed))

    def mean(self, shape: StepShape) -> float:
        decodes, chunks = shape
        num_tokens = sum(count for _, count in chunks)
        return self.step + self.row * len(decodes) + self.context * sum(decodes) + self.token * num_tokens


class KnownWalk(NamedTuple):
    device: KnownDevice
    rng: random.Random

    def seconds(self, shape: StepShape) -> float:
        return self.device.mean(shape) * (1 + self.device.spread * self.rng.uniform(-1, 1))

    def gap(self, shape: StepShape) -> float:
        return self.device.between


def machine(device: Device | None = None, timing: Timing | None = None, num_slots: int = 1 << 16) -> Machine:
    return Machine("known", device or KnownDevice(), timing or Timing(), num_slots, 4096, 1000, kv_bytes_per_token=64.0)


def simulator(
    arrivals: Sequence[Arrival],
    on: Machine | None = None,
    *,
    seed: int = 0,
    trace: StepTrace | None = None,
    num_pages: int = 0,
    **options: object,
) -> Simulator:
    on = on or machine()
    config = replace(make_config(**options), worker=WorkerOptions(num_pages=num_pages))
    requests = Load(arrivals).requests(on)
    return Simulator(
        *(config, on.hello(config), on.device, on.timing, arrivals, requests),
        seed=seed,
        trace=trace,
        encode_seconds=None if on.tower is None else on.tower.costs.seconds,
    )
