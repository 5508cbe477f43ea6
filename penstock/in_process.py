"""Scheduler and worker in the caller's process, joined without sockets.

add / handle ──▶ Scheduler ──plans──▶ ModelRunner        step() launches what the pipeline takes, then
                     ▲                    │              waits for the oldest step and applies its result
                     └─────── results ────┘
"""

import time
from collections import deque
from collections.abc import Sequence
from itertools import chain
from math import inf
from typing import NamedTuple

import numpy as np
from msgspec.structs import asdict

from penstock.config import Config, ConfigError
from penstock.core.scheduling.scheduler import Refusal, Scheduler
from penstock.gpu_worker.part import WorkerPart
from penstock.gpu_worker.startup.start import start
from penstock.gpu_worker.steps.host_step import PendingStep
from penstock.ipc.codec import deltas_of
from penstock.ipc.messages import (
    AddRequest,
    Message,
    SamplingParams,
    SequenceDelta,
    StepPlan,
    StepResult,
)
from penstock.ipc.overrides import calls, overriding

OWNER = b"in process"

_LOOK_SECONDS = 0.0005  # between two checks of what the parts have done
_MOST_SECONDS = 0.05  # longest wait for them while there is nothing to compute
_BEGIN_SECONDS = 5.0  # longest wait for what they do at the start, such as listing what a disk holds
_FINISH_SECONDS = 5.0  # longest wait for what they do when all else is done, such as writing pages


class Step(NamedTuple):
    """The result of one call of `step`: possibly news of sequences, and usually a computed step."""

    deltas: list[SequenceDelta]
    plan: StepPlan | None = None
    result: StepResult | None = None


class InProcessEngine:
    """One scheduler and one worker. One thread must make all calls; calls that compute block it."""

    def __init__(self, config: Config) -> None:
        """Load the model.

        Raises:
            ConfigError: if the configuration or the checkpoint cannot work.
        """
        began = time.perf_counter()
        for options in (config.parallel, *(each for each in config.of_parts() if each.beside == "parallel")):
            if surplus := set(asdict(options).items()) - set(asdict(type(options)()).items()):
                raise ConfigError(
                    f"{min(surplus)[0]}: an engine in process is alone, and has one worker; `penstock serve` and "
                    "`AsyncLLM` start several"
                )
        started = start(config)
        self.runner, self.hello = started.runner, started.hello
        self.use(started.parts)
        self.start_seconds = time.perf_counter() - began
        self.scheduler = Scheduler.for_worker(config, self.hello)
        self._pending: deque[tuple[StepPlan, PendingStep]] = deque()
        self._num_added = 0
        for part in self.parts:
            part.begin()
        self._exchange([], seconds=_BEGIN_SECONDS)

    def use(self, parts: Sequence[WorkerPart]) -> None:
        """Let the worker do this beside its steps, as its loop does."""
        self.parts = parts
        self._orders = {kind: part for part in parts for kind in part.orders}
        self._ends_step, self._takes_done = (calls(WorkerPart, parts, name) for name in ("end_step", "take_done"))
        self._busy, self._due = (overriding(WorkerPart, parts, name) for name in ("is_busy", "is_due"))

    def close(self) -> None:
        """Release what this engine holds exclusively, apart from memory."""
        for part in self.parts:
            part.close()

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or the result of a step was not taken yet."""
        return self.scheduler.has_work or bool(self._pending)

    def add(self, prompt: Sequence[int], sampling: SamplingParams, n: int = 1, adapter: str = "") -> str:
        """Queue a prompt of token ids with `n` sequences; returns the request's id. `adapter`: its key.

        Raises:
            ValueError: if the scheduler refuses it.
        """
        request_id = f"r{self._num_added}"
        self._num_added += 1
        buffer = np.array(prompt, dtype=np.int32).tobytes()
        if (refusal := self.add_request(AddRequest(request_id, buffer, sampling, n, adapter=adapter))) is not None:
            raise ValueError(refusal.reason)
        return request_id

    def add_request(self, request: AddRequest) -> Refusal | None:
        """Queue a request; a refusal leaves everything unchanged."""
        return self.scheduler.add_request(request, OWNER, time.monotonic())

    def step(self) -> Step:
        """Launch as many steps as the pipeline takes, and wait for the oldest one.

        The result has no plan if there is nothing to compute: no requests, only paused ones, or only those of a batch
        that must not begin yet (`seconds_to_wait`). If all requests wait for what the worker makes beside its steps,
        such as grammars, this call waits, too.
        """
        scheduler, deltas = self.scheduler, self._take_bills()
        while scheduler.can_schedule:
            step = scheduler.schedule(time.monotonic())
            for ended in scheduler.take_ended().values() if scheduler.ended else ():
                deltas += ended
            self._order(before_plan=True)
            if step is not None:
                self._pending.append((step.plan, self.runner.launch(step.plan)))
            is_idle = step is None and not self._pending
            has_news = self._exchange(deltas, seconds=_MOST_SECONDS if is_idle else 0.0)
            if step is None and not (is_idle and (has_news or scheduler.parts.num_in_making)):
                break
        if not self._pending:
            return Step(deltas)
        plan, launched = self._pending.popleft()
        result = launched.result()
        for end_step in self._ends_step:
            end_step(result)
        for batch in scheduler.process(result, time.monotonic()).values():
            deltas += deltas_of(batch)
        if not self.has_work and scheduler.parts.num_unfinished:
            self._finish()
        return Step(deltas + self._take_bills(), plan, result)

    def _take_bills(self) -> list[SequenceDelta]:
        """The last deltas of sequences that were aborted."""
        return (
            [*chain.from_iterable(self.scheduler.accounts.take_bills().values())]
            if self.scheduler.accounts.bills
            else []
        )

    @property
    def seconds_to_wait(self) -> float | None:
        """How long there will be nothing to compute, unless something else happens; None: for ever."""
        if self.has_work and self._is_busy:
            return 0.0  # nobody says when they are done: `step` looks
        wakes_at = self.scheduler.wakes_at
        return max(0.0, wakes_at - time.monotonic()) if wakes_at < inf else None

    def _order(self, *, before_plan: bool) -> None:
        for message in self.scheduler.take_messages(before_plan=before_plan):
            self._orders[type(message)].order(message)

    def _exchange(self, deltas: list[SequenceDelta], seconds: float) -> bool:
        """Give the worker's parts their orders behind the last plan, and a turn; wait `seconds` for the first answer.

        The last deltas of sequences that an answer ends are appended. Returns whether there was an answer.
        """
        self._order(before_plan=False)
        answers = self._answers()
        until = time.monotonic() + seconds if seconds else 0.0
        while not answers and seconds and self._is_busy and time.monotonic() < until:
            if not any(part.is_due for part in self._due):
                time.sleep(_LOOK_SECONDS)
            answers = self._answers()
        for answer in answers:
            if type(answer) in self.scheduler.parts.answered:
                for ended in self.scheduler.answered(answer).values():
                    deltas += ended
        return bool(answers)

    def have_done(self, order: Message) -> None:
        """Have the worker do what the scheduler has not asked for, and wait until it is done; answers are dropped."""
        self._orders[type(order)].order(order)
        while self._is_busy:
            if not self._answers():
                time.sleep(_LOOK_SECONDS)

    @property
    def _is_busy(self) -> bool:
        """Whether the worker does something beside its steps."""
        return any(part.is_busy for part in self._busy)

    def _answers(self) -> list[Message]:
        """What the worker's parts have done; those whose work uses the device get a turn."""
        answers: list[Message] = []
        for part in self._due:
            if part.is_due and (answer := part.work(None)) is not None:
                answers.append(answer)
        for take_done in self._takes_done:
            answers += take_done()
        return answers

    def _finish(self) -> None:
        """Let parts do what they do when there is no other work: the caller may end now."""
        until = time.monotonic() + _FINISH_SECONDS
        while self.scheduler.parts.num_unfinished and time.monotonic() < until:
            step = self.scheduler.schedule(time.monotonic())
            if step is not None:
                self.scheduler.process(self.runner.launch(step.plan).result(), time.monotonic())
            self._exchange([], seconds=_MOST_SECONDS)
