"""The product's engine in process (`penstock/in_process.py`), with the times of its steps."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.gpu_worker.steps.host_step import PendingStep
from penstock.in_process import InProcessEngine
from penstock.ipc.messages import SamplingParams, StepPlan
from penstock.options import config_of

_QUEUED = 4
"""Plans under way at a time while recorded ones are executed again: enough that the device never waits for one."""


class StepTimes(NamedTuple):
    """One step: its size, when its result was taken (seconds), and what the device said (microseconds)."""

    num_rows: int
    num_tokens: int
    ended: float
    device_us: int
    idle_us: int


class Run(NamedTuple):
    """Requests that ran to their end."""

    seconds: float
    num_output_tokens: int
    steps: list[StepTimes]
    plans: list[StepPlan]


class LocalEngine(InProcessEngine):
    """Pipeline depth 1, random weights of a shape; the prefix cache is off unless it is asked for."""

    def __init__(self, folder: Path, **options: Any) -> None:
        defaults = {"load_format": "dummy", "pipeline_depth": 1, "enable_prefix_caching": False, "num_threads": 1}
        super().__init__(config_of({"model": str(folder)} | defaults | options, {}))

    def run(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], adapters: Sequence[str] = ()
    ) -> Run:
        """All requests at once, to their end; `adapters`: the key of each one's.

        Raises:
            RuntimeError: if one fails.
        """
        num_output_tokens, steps, plans = 0, list[StepTimes](), list[StepPlan]()
        began = time.perf_counter()
        for prompt, params, adapter in zip(prompts, sampling, adapters or [""] * len(prompts), strict=True):
            self.add(prompt, params, adapter=adapter)
        while self.has_work:
            deltas, plan, result = self.step()
            for delta in deltas:
                if delta.finish_reason == "error":
                    raise RuntimeError(delta.error)
                num_output_tokens += len(delta.token_ids)
            if plan is not None and result is not None:
                num_tokens = int(np.frombuffer(plan.num_new, dtype=np.int32).sum())
                times = (time.perf_counter(), result.num_forward_us, result.num_idle_us)
                steps.append(StepTimes(len(plan.rows) // 4, num_tokens, *times))
                plans.append(plan)
        return Run(time.perf_counter() - began, num_output_tokens, steps, plans)

    def repeat(
        self, plans: Sequence[StepPlan], num_untimed: int, before_timed: Callable[[], object] = lambda: None
    ) -> tuple[float, float]:
        """Execute a run's plans again, several queued at a time, so that the device never waits for a scheduler.

        The plans of a run start from free rows, and what they compute depends on nothing that the host decides.

        Args:
            plans: all plans of a run.
            num_untimed: how many of them come before those that are timed.
            before_timed: is called before the first of those.

        Returns:
            Seconds per timed step: of the whole, and of the host's part in launching.
        """
        self.runner.clear_rows()
        for plan in plans[:num_untimed]:
            self.runner.launch(plan).result()
        pending = deque[PendingStep]()
        launching = 0.0
        before_timed()
        began = time.perf_counter()
        for plan in plans[num_untimed:]:
            if len(pending) == _QUEUED:
                pending.popleft().result()
            before = time.perf_counter()
            pending.append(self.runner.launch(plan))
            launching += time.perf_counter() - before
        while pending:
            pending.popleft().result()
        num_timed = len(plans) - num_untimed
        return (time.perf_counter() - began) / num_timed, launching / num_timed
