"""The stages of a pipeline in this process: each goes on when it can, in an order that a seed draws."""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.config import Config
from penstock.config.groups.parallel import ParallelOptions
from penstock.config.ranks import Place, Rank
from penstock.core.scheduling.scheduler import Scheduler
from penstock.gpu_worker.parallel.alone import Alone
from penstock.gpu_worker.startup import loaded, start
from penstock.gpu_worker.steps.stage_runner import StageRunner
from penstock.ipc.messages import StepPlan, StepResult
from tests.gpu_worker.engine_in_process import Engine, make_config
from tests.parts.drafts.drafters import draft_with
from tests.parts.drafts.lengths import draft_always
from tests.parts.drafts.worker.remembered import Remembered

_PATIENCE = 120.0  # seconds until something is due


class _Ranks(Alone):
    """Of stages that are threads: what they send lies in queues."""

    def __init__(self, place: Place, ways: dict[tuple[int, int], "SimpleQueue[Tensor]"]) -> None:
        self.place = place
        self._ways = ways

    def send(self, x: Tensor, stage: int) -> None:
        self._ways[self.place.stage, stage].put(x.clone())

    def receive(self, x: Tensor, stage: int) -> Tensor:
        return x.copy_(self._ways[stage, self.place.stage].get(timeout=_PATIENCE))


class _Launched(NamedTuple):
    stages: "Stages"
    step_id: int

    def result(self) -> StepResult:
        return self.stages.result(self.step_id)


class Stages:
    """All stages, as the one runner that the scheduler takes them for."""

    def __init__(self, config: Config, folder: Path, seed: int) -> None:
        self.num_stages = num_stages = config.parallel.pipeline_parallel_size
        ways = {(i, j): SimpleQueue[Tensor]() for i in range(num_stages) for j in range(num_stages)}
        config = replace(config, ipc=replace(config.ipc, rendezvous_address=f"file://{folder}/ranks"))

        def begin(number: int) -> start.Started:
            torch.set_num_threads(1)
            return start.start(config, Rank(number, num_stages))

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(num_stages) as threads:
            patch.setattr(
                loaded, "open_ranks", lambda _, number, *_others: _Ranks(Place(0, 1, number, num_stages), ways)
            )
            self.started = list(threads.map(begin, range(num_stages)))
        self.stages: list[StageRunner] = []
        for each in self.started:
            assert each.stage is not None
            self.stages.append(each.stage)
        self._held: list[deque[StepPlan]] = [deque() for _ in self.stages]
        self._results: dict[int, StepResult] = {}
        self._rng = Random(seed)
        self.log: list[tuple[int, int]] = []  # stage, step: as they were launched

    def launch(self, plan: StepPlan) -> _Launched:
        for held in self._held:
            held.append(plan)
        for _ in range(self._rng.randrange(3)):
            self._advance()
        return _Launched(self, plan.step_id)

    def result(self, step_id: int) -> StepResult:
        until = time.monotonic() + _PATIENCE
        while step_id not in self._results:
            if not self._advance():
                assert time.monotonic() < until, "nothing is due"
                time.sleep(2e-5)
        return self._results.pop(step_id)

    def _advance(self) -> bool:
        """Let one stage launch its next plan; False if none is due."""
        for number in self._rng.sample(range(self.num_stages), self.num_stages):
            held, stage = self._held[number], self.stages[number]
            if held and stage.is_due(held[0]):
                plan = held.popleft()
                self.log.append((number, plan.step_id))
                result = stage.launch(plan).result()
                if number == self.num_stages - 1:
                    self._results[plan.step_id] = result
                return True
        return False

    def clear_rows(self, epoch: int) -> None:
        """As when a scheduler welcomes the stages."""
        for held, stage in zip(self._held, self.stages, strict=True):
            held.clear()
            stage.begin(epoch)
            stage.clear_rows()
        self._results.clear()

    def close(self) -> None:
        for stage in self.stages:
            stage.close()


class StagedEngine(Engine):
    """See `Engine`. `texts`: what stages guess from, see `Remembered`."""

    def __init__(
        self,
        folder: Path,
        *,
        num_stages: int,
        seed: int = 0,
        layers: str = "",
        texts: list[list[int]] | None = None,
        **options: Any,
    ) -> None:
        parallel = ParallelOptions(pipeline_parallel_size=num_stages, pipeline_layers=layers)
        config = replace(make_config(folder, **options), parallel=parallel)
        self.stages = Stages(config, folder, seed)
        hellos = [each.hello for each in self.stages.started]
        least = min(hello.num_pages for hello in hellos)
        (self.hello,) = [replace(hello, num_pages=least) for hello in hellos if hello.answers]
        self.runner = self.stages  # type: ignore[assignment]
        self.use(self.stages.started[-1].parts)
        limits = start_limits(config, self.hello)
        self.scheduler = Scheduler(config, limits)
        if texts is not None:
            for each in self.stages.started:
                draft_with(each.runner, partial(Remembered, texts))
            draft_always(self.scheduler, 3)
        self._pending = deque()
        self._num_added = 0
        self.outputs, self.last_delta = {}, {}

    def close(self) -> None:
        self.stages.close()


def start_limits(config: Config, hello: Any) -> Any:
    """Of the scheduler."""
    from penstock.core.sequences.limits import WorkerLimits

    return WorkerLimits.of(config.scheduler, hello)


def overlaps(log: Sequence[tuple[int, int]]) -> int:
    """How many steps were launched on a stage while a later stage had not launched the one before."""
    done: dict[int, int] = {}
    count = 0
    for stage, step in log:
        done[stage] = step
        count += stage + 1 in {each for each, _ in log} and done.get(stage + 1, -1) < step - 1
    return count
