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

from penstock.config import Config, ConfigError
from penstock.config.groups.parallel import ParallelOptions
from penstock.core.scheduling.orders import Orders, has_orders, take_orders
from penstock.core.scheduling.scheduler import Refusal, Scheduler
from penstock.gpu_worker.disk.mover import DiskMover
from penstock.gpu_worker.images.store import EmbeddingStore
from penstock.gpu_worker.startup.start import start
from penstock.gpu_worker.steps.host_step import PendingStep
from penstock.ipc.codec import deltas_of
from penstock.ipc.messages import (
    AddRequest,
    SamplingParams,
    SequenceDelta,
    StepPlan,
    StepResult,
)

OWNER = b"in process"

_LOOK_SECONDS = 0.0005  # between two checks of what the disk has done
_MOST_SECONDS = 0.05  # longest wait for the disk while there is nothing to compute
_LISTING_SECONDS = 5.0  # longest wait for the list of what the disk holds, at the start
_IMAGE_SECONDS = 0.005  # of each step, for images that are being encoded
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
        self.runner, self.hello, self._disk = started.runner, started.hello, started.disk
        self.start_seconds = time.perf_counter() - began
        self.scheduler = Scheduler.for_worker(config.scheduler, self.hello)
        self._pending: deque[tuple[StepPlan, PendingStep]] = deque()
        self._num_added = 0
        if self._disk is not None:
            self._disk.begin()
            self._exchange_pages(self._disk, seconds=_LISTING_SECONDS)

    def close(self) -> None:
        """Release what this engine holds exclusively, apart from memory: the folder of a disk tier."""
        if self._disk is not None:
            self._disk.close()

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
        that must not begin yet (`seconds_to_wait`). If all requests wait for grammars to be prepared, this call waits,
        too.
        """
        scheduler, deltas = self.scheduler, self._take_bills()
        while scheduler.can_schedule:
            step = scheduler.schedule(time.monotonic())
            for ended in scheduler.take_ended().values() if scheduler.ended else ():
                deltas += ended
            if has_orders(scheduler):
                self._order(take_orders(scheduler))
            if self.runner.grammar_store.is_busy:
                is_idle = step is None and not self._pending
                deltas += self.exchange_grammars(wait=is_idle)
                if is_idle:
                    continue
            if self.runner.image_store is not None:
                is_idle = step is None and not self._pending
                if self._exchange_images(self.runner.image_store, deltas) and is_idle:
                    continue
            if step is not None:
                self._pending.append((step.plan, self.runner.launch(step.plan)))
            if self._disk is not None:
                is_idle = step is None and not self._pending
                if self._exchange_pages(self._disk, seconds=_MOST_SECONDS if is_idle else 0.0) and is_idle:
                    continue
            if step is None:
                break
        if not self._pending:
            return Step(deltas)
        plan, launched = self._pending.popleft()
        result = launched.result()
        for batch in scheduler.process(result, time.monotonic()).values():
            deltas += deltas_of(batch)
        if self._disk is not None and not self.has_work:
            self._write_pages(self._disk)
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
        if self._disk is not None and self._disk.is_busy and self.has_work:
            return 0.0  # nobody says when pages have come: `step` looks
        wakes_at = self.scheduler.wakes_at
        return max(0.0, wakes_at - time.monotonic()) if wakes_at < inf else None

    def _exchange_pages(self, disk: DiskMover, seconds: float) -> bool:
        """Order the page moves that the scheduler asks for, and report finished moves; wait `seconds` for the first.

        Returns:
            Whether there was anything to report.
        """
        moves = self.scheduler.disk
        if moves is None:
            return False
        for message in moves.take_messages():
            disk.order(message)
        until = time.monotonic() + seconds
        while not (answers := disk.take_done()) and disk.is_busy and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        for answer in answers:
            moves.answered(answer)
        return bool(answers)

    def _write_pages(self, disk: DiskMover) -> None:
        """Write the pages that wait to be written. There is no other work, and the caller may end now."""
        moves, until = self.scheduler.disk, time.monotonic() + _WRITING_SECONDS
        while moves is not None and moves.num_under_way and time.monotonic() < until:
            step = self.scheduler.schedule(time.monotonic())
            if step is not None:
                self.scheduler.process(self.runner.launch(step.plan).result(), time.monotonic())
            self._exchange_pages(disk, seconds=_MOST_SECONDS)

    def _exchange_images(self, store: EmbeddingStore, deltas: list[SequenceDelta]) -> bool:
        """Go on with the images that the scheduler asks for; return whether there was anything to do.

        If an image failed, the final deltas of its sequences are appended.
        """
        was_busy = store.is_busy
        if (encoded := store.encode(_IMAGE_SECONDS)) is not None:
            for ended in self.scheduler.image_encoded(encoded).values():
                deltas += ended
        return was_busy

    def _order(self, orders: Orders) -> None:
        store, images = self.runner.grammar_store, self.runner.image_store
        for order in orders:
            if isinstance(order, store.orders):
                store.order(order)
            else:
                assert images is not None, "the scheduler knows from the worker whether there are images"
                images.order(order)

    def exchange_grammars(self, *, wait: bool = True) -> list[SequenceDelta]:
        """Prepare the grammars that the scheduler asks for; return last deltas of sequences whose grammar failed."""
        store, deltas = self.runner.grammar_store, list[SequenceDelta]()
        self._order(take_orders(self.scheduler))
        for prepared in store.take_prepared(wait=wait):
            for ended in self.scheduler.grammar_prepared(prepared).values():
                deltas += ended
        return deltas
