"""The engine in this process, with the time of each of its steps."""

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
"""Prompts use ids from here on, because the special tokens of the vocabularies used here are below it."""


class TimedStep(NamedTuple):
    """A step, or the median of several steps in which the same sequences took one token each."""

    chunks: list[tuple[int, int]]  # for each sequence: first position, number of positions
    seconds: float


class TimedEngine(InProcessEngine):
    """An engine without prefix cache and without overlapping steps, so each step can be timed by itself."""

    def __init__(self, folder: Path, **options: Any) -> None:
        # The time of prompts beside decodes is not limited, because then the steps would depend on their own times.
        defaults = {"pipeline_depth": 0, "enable_prefix_caching": False, "max_prefill_ms": 0}
        super().__init__(config_of({"model": str(folder)} | defaults | options, {}))
        self._rng = np.random.default_rng(0)

    def best(self, batch: int, context: int, num_steps: int) -> list[TimedStep]:
        """As `run`, but short runs are repeated and the best time counts: other load only makes steps longer."""
        began = time.perf_counter()
        tries = [self.run(batch, context, num_steps)]
        while len(tries) < _MOST_TRIES and time.perf_counter() - began < _TRY_SECONDS:
            tries.append(self.run(batch, context, num_steps))
        return quickest(tries)

    def run(self, batch: int, context: int, num_steps: int) -> list[TimedStep]:
        """Run `batch` prompts of `context` tokens at once, and then decode `num_steps` tokens for each.

        Returns:
            The steps with prompts, then the median of the steps that decode the whole batch, if there are any.
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
    """For each step of a repeated run, the try that took the least time."""
    return [min(same, key=lambda step: step.seconds) for same in zip(*tries, strict=True)]


def _median(steps: Sequence[TimedStep]) -> TimedStep:
    return TimedStep(steps[len(steps) // 2].chunks, statistics.median(step.seconds for step in steps))
