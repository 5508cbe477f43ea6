"""The engine in this process, with the time that each of its steps takes."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.in_process import InProcessEngine
from penstock.ipc.messages import SamplingParams
from penstock.options import config_of

_MOST_TRIES, _TRY_SECONDS = 3, 0.1
FIRST_ID = 5
"""Prompts are of ids from here on: special tokens are before it in the vocabularies that this meets."""


class TimedStep(NamedTuple):
    """A step, or several of the same sequences that took one token each: of these, the median."""

    chunks: list[tuple[int, int]]  # of each sequence: first position, number of positions
    seconds: float


class TimedEngine(InProcessEngine):
    """No prefix cache, and no overlap of steps: each one's time is its own."""

    def __init__(self, folder: Path, **options: Any) -> None:
        # No bound of prompts' time beside decodes: which steps there are would depend on how long they take.
        defaults = {"pipeline_depth": 0, "enable_prefix_caching": False, "max_prefill_ms": 0}
        super().__init__(config_of({"model": str(folder)} | defaults | options, {}))
        self._rng = np.random.default_rng(0)

    def best(self, batch: int, context: int, num_steps: int) -> list[TimedStep]:
        """As `run`, and short runs again: whatever else the machine does makes steps longer, never shorter."""
        began = time.perf_counter()
        tries = [self.run(batch, context, num_steps)]
        while len(tries) < _MOST_TRIES and time.perf_counter() - began < _TRY_SECONDS:
            tries.append(self.run(batch, context, num_steps))
        return quickest(tries)

    def run(self, batch: int, context: int, num_steps: int) -> list[TimedStep]:
        """So many prompts of this length at once, and after them so many tokens for each.

        Returns:
            The steps with prompts, then the median of those that decode the whole batch, if there are any.
        """
        most = self.hello.vocab_size
        for prompt in self._rng.integers(min(FIRST_ID, most - 1), most, (batch, context)).tolist():
            self.add(prompt, SamplingParams(max_tokens=1 + num_steps, temperature=0.0))
        prompts, decodes = list[TimedStep](), list[TimedStep]()
        while self.has_work:
            began = time.perf_counter()
            deltas, plan, _ = self.step()
            seconds = time.perf_counter() - began
            if (error := next((delta.error for delta in deltas if delta.error), None)) is not None:
                raise RuntimeError(error)
            if plan is None:
                continue
            first, count = (np.frombuffer(column, dtype=np.int32).tolist() for column in (plan.start, plan.num_new))
            timed = TimedStep(list(zip(first, count, strict=True)), seconds)
            if max(count) > 1:
                prompts.append(timed)
            elif len(count) == batch:
                decodes.append(timed)
        return prompts + ([_median(decodes)] if decodes else [])


def quickest(tries: Sequence[Sequence[TimedStep]]) -> list[TimedStep]:
    """Of each step of the same run, the try that took least."""
    return [min(same, key=lambda step: step.seconds) for same in zip(*tries, strict=True)]


def _median(steps: Sequence[TimedStep]) -> TimedStep:
    return TimedStep(steps[len(steps) // 2].chunks, statistics.median(step.seconds for step in steps))
