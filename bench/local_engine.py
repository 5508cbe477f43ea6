"""The scheduler and the runner in one process, joined as the engine joins them but without sockets or HTTP."""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.core.config import Config, ModelOptions, SchedulerOptions, WorkerOptions
from penstock.core.config.options import CpuKernels
from penstock.core.scheduling.scheduler import Scheduler
from penstock.gpu_worker.startup.start import start
from penstock.gpu_worker.steps.model_runner import PendingStep
from penstock.ipc.deltas import deltas_of
from penstock.ipc.messages import AddRequest, PrepareGrammar, SamplingParams, StepPlan

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


class LocalEngine:
    """Pipeline depth 1, random weights of a shape; the prefix cache is off unless it is asked for."""

    def __init__(
        self,
        folder: Path,
        *,
        device: str,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_pages: int = 0,
        enforce_eager: bool = False,
        num_threads: int = 1,
        cpu_kernels: CpuKernels = "auto",
        enable_prefix_caching: bool = False,
    ) -> None:
        config = Config(
            model=ModelOptions(model=str(folder), max_model_len=max_model_len),
            scheduler=SchedulerOptions(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                pipeline_depth=1,
                enable_prefix_caching=enable_prefix_caching,
            ),
            worker=WorkerOptions(
                device=device,
                load_format="dummy",
                num_pages=num_pages,
                enforce_eager=enforce_eager,
                num_threads=num_threads,
                cpu_kernels=cpu_kernels,
            ),
        )
        began = time.perf_counter()
        self.runner, self.hello = start(config, "bench")
        self.start_seconds = time.perf_counter() - began
        self._scheduler = Scheduler.for_worker(config.scheduler, self.hello)
        self._num_requests = 0

    def run(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> Run:
        """All requests at once, to their end.

        Raises:
            RuntimeError: if one is refused, or fails.
        """
        scheduler, pending = self._scheduler, deque[tuple[StepPlan, PendingStep]]()
        num_output_tokens, steps, plans = 0, list[StepTimes](), list[StepPlan]()
        began = time.perf_counter()
        for prompt, params in zip(prompts, sampling, strict=True):
            self._num_requests += 1
            ids = np.array(prompt, dtype=np.int32).tobytes()
            refusal = scheduler.add_request(AddRequest(f"r{self._num_requests}", ids, params), owner=b"bench")
            if refusal is not None:
                raise RuntimeError(refusal.reason)
        while scheduler.has_work or pending:
            while scheduler.can_schedule:
                step = scheduler.schedule()
                self._prepare_grammars()
                if step is None:
                    break
                pending.append((step.plan, self.runner.launch(step.plan)))
            if not pending:
                continue  # a grammar has become ready
            plan, launched = pending.popleft()
            result = launched.result()
            for batch in scheduler.process(result).values():
                for delta in deltas_of(batch):
                    if delta.finish_reason == "error":
                        raise RuntimeError(delta.error)
                    num_output_tokens += len(delta.token_ids)
            num_tokens = int(np.frombuffer(plan.num_new, dtype=np.int32).sum())
            times = (time.perf_counter(), result.num_forward_us, result.num_idle_us)
            steps.append(StepTimes(len(plan.rows) // 4, num_tokens, *times))
            plans.append(plan)
        return Run(time.perf_counter() - began, num_output_tokens, steps, plans)

    def _prepare_grammars(self) -> None:
        store = self.runner.grammar_store
        for message in self._scheduler.grammars.take_messages():
            if isinstance(message, PrepareGrammar):
                store.prepare(message)
            else:
                store.drop(message.grammar_id)
        for prepared in store.take_prepared(wait=True):
            for deltas in self._scheduler.grammar_prepared(prepared).values():
                raise RuntimeError(deltas[0].error)

    def repeat(self, plans: Sequence[StepPlan], num_untimed: int) -> tuple[float, float]:
        """Execute a run's plans again, several queued at a time, so that the device never waits for a scheduler.

        The plans of a run start from free rows, and what they compute depends on nothing that the host decides.

        Args:
            plans: all plans of a run.
            num_untimed: how many of them come before those that are timed.

        Returns:
            Seconds per timed step: of the whole, and of the host's part in launching.
        """
        self.runner.clear_rows()
        for plan in plans[:num_untimed]:
            self.runner.launch(plan).result()
        pending = deque[PendingStep]()
        launching = 0.0
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
