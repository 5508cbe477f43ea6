"""Scheduler and worker in the caller's process, joined without sockets.

add / handle ──▶ Scheduler ──plans──▶ ModelRunner        step() launches what the pipeline takes, then
                     ▲                    │              waits for the oldest step and applies its result
                     └─────── results ────┘
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.core.config import Config
from penstock.core.scheduling.scheduler import Refusal, Scheduler
from penstock.gpu_worker.startup.start import start
from penstock.gpu_worker.steps.host_step import PendingStep
from penstock.ipc.codec import deltas_of
from penstock.ipc.messages import AddRequest, PrepareGrammar, SamplingParams, SequenceDelta, StepPlan, StepResult

OWNER = b"in process"


class Step(NamedTuple):
    """What one call of `step` brought: nothing, news of sequences, and usually a step that was computed."""

    deltas: list[SequenceDelta]
    plan: StepPlan | None = None
    result: StepResult | None = None


class InProcessEngine:
    """One scheduler and one worker. All calls are made by one thread; those that compute block it."""

    def __init__(self, config: Config) -> None:
        """Load the model.

        Raises:
            ConfigError: if the configuration or the checkpoint cannot work.
        """
        began = time.perf_counter()
        self.runner, self.hello = start(config)
        self.start_seconds = time.perf_counter() - began
        self.scheduler = Scheduler.for_worker(config.scheduler, self.hello)
        self._pending: deque[tuple[StepPlan, PendingStep]] = deque()
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        """Some request is not finished, or some step not taken yet."""
        return self.scheduler.has_work or bool(self._pending)

    def add(self, prompt: Sequence[int], sampling: SamplingParams, n: int = 1) -> str:
        """Queue a prompt of token ids with `n` sequences; the request's id.

        Raises:
            ValueError: if the scheduler refuses it.
        """
        request_id = f"r{self._num_added}"
        self._num_added += 1
        buffer = np.array(prompt, dtype=np.int32).tobytes()
        if (refusal := self.add_request(AddRequest(request_id, buffer, sampling, n))) is not None:
            raise ValueError(refusal.reason)
        return request_id

    def add_request(self, request: AddRequest) -> Refusal | None:
        """Queue a request; a refusal leaves everything unchanged."""
        return self.scheduler.add_request(request, OWNER, time.monotonic())

    def step(self) -> Step:
        """Launch what the pipeline takes, and wait for the oldest step.

        It has no plan if there is nothing to compute: no request, or only paused ones. If all wait for grammars to be
        made ready, so does this call.
        """
        scheduler, deltas = self.scheduler, list[SequenceDelta]()
        while scheduler.can_schedule:
            step = scheduler.schedule(time.monotonic())
            if scheduler.grammars.messages or self.runner.grammar_store.is_preparing:
                is_idle = step is None and not self._pending
                deltas += self.exchange_grammars(wait=is_idle)
                if is_idle:
                    continue
            if step is None:
                break
            self._pending.append((step.plan, self.runner.launch(step.plan)))
        if not self._pending:
            return Step(deltas)
        plan, launched = self._pending.popleft()
        result = launched.result()
        for batch in scheduler.process(result).values():
            deltas += deltas_of(batch)
        return Step(deltas, plan, result)

    def exchange_grammars(self, *, wait: bool = True) -> list[SequenceDelta]:
        """Have the grammars made ready that the scheduler asks for; the ends of sequences whose grammar failed."""
        store, deltas = self.runner.grammar_store, list[SequenceDelta]()
        for message in self.scheduler.grammars.take_messages():
            if isinstance(message, PrepareGrammar):
                store.prepare(message)
            else:
                store.drop(message.grammar_id)
        for prepared in store.take_prepared(wait=wait):
            for ended in self.scheduler.grammar_prepared(prepared).values():
                deltas += ended
        return deltas
