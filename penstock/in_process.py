"""Scheduler and worker in the caller's process, joined without sockets.

add / handle ──▶ Scheduler ──plans──▶ ModelRunner        step() launches what the pipeline takes, then
                     ▲                    │              waits for the oldest step and applies its result
                     └─────── results ────┘
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from math import inf
from typing import NamedTuple

import numpy as np

from penstock.config import Config, ConfigError
from penstock.config.groups.parallel import ParallelOptions
from penstock.core.scheduling.orders import has_orders, take_orders
from penstock.core.scheduling.scheduler import Refusal, Scheduler
from penstock.gpu_worker.part import WorkerPart
from penstock.gpu_worker.startup.start import start
from penstock.gpu_worker.steps.host_step import PendingStep
from penstock.ipc.codec import deltas_of
from penstock.ipc.messages import (
    AddRequest,
    DiskContents,
    GrammarPrepared,
    ImageEncoded,
    KVLoaded,
    KVStored,
    Message,
    SamplingParams,
    SequenceDelta,
    StepPlan,
    StepResult,
)
from penstock.ipc.overrides import calls, overriding

OWNER = b"in process"

_LOOK_SECONDS = 0.0005  # between two checks of what the worker's parts have done
_MOST_SECONDS = 0.05  # longest wait for them while there is nothing to compute
_LISTING_SECONDS = 5.0  # longest wait for the list of what the disk holds, at the start
_WRITING_SECONDS = 5.0  # longest wait for pages to be written when all else is done


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
        if config.parallel != ParallelOptions():
            raise ConfigError(
                "tensor_parallel_size and the options like it: an engine in process has one worker; `penstock serve` "
                "and `AsyncLLM` start several"
            )
        started = start(config)
        self.runner, self.hello = started.runner, started.hello
        self.start_seconds = time.perf_counter() - began
        self.scheduler = Scheduler.for_worker(config.scheduler, self.hello)
        self._pending: deque[tuple[StepPlan, PendingStep]] = deque()
        self._num_added = 0
        self._use(started.parts)
        for part in started.parts:
            part.begin()
        self._exchange([], seconds=_LISTING_SECONDS)

    def _use(self, parts: Sequence[WorkerPart]) -> None:
        """Let the worker do this beside its steps, as its loop does."""
        self.parts = parts
        self._orders = {kind: part.order for part in parts for kind in part.orders}
        self._takes_done, self._ends_step = (calls(WorkerPart, parts, name) for name in ("take_done", "end_step"))
        self._busy, self._due = (overriding(WorkerPart, parts, name) for name in ("is_busy", "is_due"))

    def close(self) -> None:
        """Release what this engine holds exclusively, apart from memory, such as the folder of a disk tier."""
        for part in self.parts:
            part.close()

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or the result of a step was not taken yet."""
        return self.scheduler.has_work or bool(self._pending)

    def add(self, prompt: Sequence[int], sampling: SamplingParams, n: int = 1) -> str:
        """Queue a prompt of token ids with `n` sequences; returns the request's id.

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
        """Launch as many steps as the pipeline takes, and wait for the oldest one.

        The result has no plan if there is nothing to compute: no requests, only paused ones, or only those of a batch
        that must not begin yet (`seconds_to_wait`). If all requests wait for what the worker makes beside its steps,
        this call waits for a while, too.
        """
        scheduler, deltas = self.scheduler, self._take_bills()
        while scheduler.can_schedule:
            step = scheduler.schedule(time.monotonic())
            for ended in scheduler.take_ended().values() if scheduler.ended else ():
                deltas += ended
            if has_orders(scheduler):
                self._order(take_orders(scheduler))
            if step is not None:
                self._pending.append((step.plan, self.runner.launch(step.plan)))
            is_idle = step is None and not self._pending
            if self._exchange(deltas, seconds=_MOST_SECONDS if is_idle else 0.0) and is_idle:
                continue
            if step is None:
                break
        if not self._pending:
            return Step(deltas)
        plan, launched = self._pending.popleft()
        result = launched.result()
        for end_step in self._ends_step:
            end_step(result)
        for batch in scheduler.process(result, time.monotonic()).values():
            deltas += deltas_of(batch)
        if scheduler.disk is not None and not self.has_work:
            self._write_pages()
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
        if self.has_work and any(part.is_busy for part in self._busy):
            return 0.0  # nobody says when pages have come, or a grammar is ready: `step` looks
        wakes_at = self.scheduler.wakes_at
        return max(0.0, wakes_at - time.monotonic()) if wakes_at < inf else None

    def _order(self, orders: Iterable[Message]) -> None:
        for order in orders:
            self._orders[type(order)](order)

    def have_done(self, order: Message) -> None:
        """Have the worker do what the scheduler has not asked for, and wait until it is done; answers are dropped."""
        self._order([order])
        while not self._answers() and any(part.is_busy for part in self._busy):
            time.sleep(_LOOK_SECONDS)

    def _exchange(self, deltas: list[SequenceDelta], seconds: float = 0.0) -> bool:
        """Let the worker go on beside its steps, and report what it has done; wait `seconds` for the first answer.

        The last deltas of sequences that end with an answer are appended.

        Returns:
            Whether there was anything to report.
        """
        if self.scheduler.disk is not None:
            self._order(self.scheduler.disk.take_messages())
        until = time.monotonic() + seconds
        while not (answers := self._answers()) and any(part.is_busy for part in self._busy):
            if time.monotonic() >= until:
                break
            if not any(part.is_due for part in self._due):
                time.sleep(_LOOK_SECONDS)
        for answer in answers:
            self._answered(answer, deltas)
        return bool(answers)

    def _answers(self) -> list[Message]:
        """What has become ready, after each part that is due has used the device for a while."""
        worked = [part.work(None) for part in self._due if part.is_due]
        return [*chain.from_iterable(take_done() for take_done in self._takes_done), *filter(None, worked)]

    def _answered(self, answer: Message, deltas: list[SequenceDelta]) -> None:
        """Tell the scheduler of an answer."""
        match answer:
            case GrammarPrepared():
                ended = self.scheduler.grammar_prepared(answer)
            case ImageEncoded():
                ended = self.scheduler.image_encoded(answer)
            case KVStored() | KVLoaded() | DiskContents() if self.scheduler.disk is not None:
                self.scheduler.disk.answered(answer)
                return
            case _:
                return
        deltas += chain.from_iterable(ended.values())

    def _write_pages(self) -> None:
        """Write the pages that wait to be written. There is no other work, and the caller may end now."""
        moves, until = self.scheduler.disk, time.monotonic() + _WRITING_SECONDS
        while moves is not None and moves.num_under_way and time.monotonic() < until:
            step = self.scheduler.schedule(time.monotonic())
            if step is not None:
                self.scheduler.process(self.runner.launch(step.plan).result(), time.monotonic())
            self._exchange([], seconds=_MOST_SECONDS)
