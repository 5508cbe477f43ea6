"""`python -m penstock.lab.calibration`: measures for `penstock plan`, which does not load torch itself.

Each line on stdin is a request as JSON (`Request`). Each line on stdout is an answer as JSON: what was asked for, or
{"error": ...}. The process keeps what it has loaded until its input ends.
"""

import os
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock.config import ConfigError
from penstock.gpu_worker.devices.cpu import num_cores
from penstock.lab.calibration.installation import inspect
from penstock.lab.calibration.rates import read_rate
from penstock.lab.calibration.this_machine import ThisCpu, resident_bytes, this_cpu, this_gpu
from penstock.lab.calibration.timed_engine import TimedEngine
from penstock.lab.planning.machines import load_machines
from penstock.lab.planning.requests import (
    Describe,
    Inspect,
    Loaded,
    LoadModel,
    MeasurePace,
    Memory,
    MemoryRate,
    Ran,
    Remeasure,
    Request,
    Run,
)
from penstock.options import quiet


class Calibration:
    """Answers requests."""

    def __init__(self) -> None:
        self._engine: TimedEngine | None = None

    @cached_property
    def _cpu(self) -> ThisCpu:
        return ThisCpu()

    def answer(self, request: Request) -> object:
        """The answer to a request."""
        match request:
            case Describe(machines, again):
                if torch.cuda.is_available():
                    return this_gpu(load_machines(None if machines is None else Path(machines)))
                return this_cpu(again=again)
            case Remeasure():
                return self._cpu.measure()
            case LoadModel(model, options):
                return self._load(Path(model), options)
            case Run(batch, context, num_steps):
                if self._engine is None:
                    raise ConfigError("no model is loaded")
                return Ran([(step.chunks, step.seconds) for step in self._engine.best(batch, context, num_steps)])
            case MemoryRate():
                return read_rate(num_cores())
            case MeasurePace():
                return self._cpu.pace()
            case Memory():
                return resident_bytes()
            case Inspect():
                return inspect()

    def _load(self, model: Path, options: dict[str, Any]) -> Loaded:
        kind = "safetensors" if any(model.glob("*.safetensors")) else "dummy"
        self._engine = TimedEngine(model, load_format=kind, **options)
        hello = self._engine.hello
        return Loaded(hello.device, hello.dtype, self._engine.start_seconds)


def main() -> None:
    """Answer requests until there are no more."""
    quiet("auto")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # only answers may go to the original stdout
    calibration = Calibration()
    decoder = msgspec.json.Decoder(Request)
    for line in sys.stdin.buffer:
        answers.write(msgspec.json.encode(_answered(calibration.answer, decoder.decode(line))) + b"\n")


def _answered(answer: Callable[[Request], object], request: Request) -> object:
    try:
        return {"answer": answer(request)}
    except (ConfigError, RuntimeError, ValueError, MemoryError, OSError) as error:
        return {"error": str(error) or type(error).__name__}


if __name__ == "__main__":
    main()
