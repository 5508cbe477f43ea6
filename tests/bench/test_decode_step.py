"""What `bench.engine.decode_step` compares: the same steps, once as they were served and once queued."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.engine.decode_step import measure, whole_steps
from bench.local_engine import LocalEngine, Run, StepTimes
from penstock.ipc.messages import StepPlan
from penstock.models.description.model_config import ModelConfig

SIZES = ((1, 8), (2, 9), (3, 10), (4, 7), (4, 4), (4, 4), (4, 4), (4, 4), (3, 3), (2, 2), (1, 1))
"""Rows and tokens: prompts are computed one after the other, so the sequences end one after the other, too."""


def run() -> Run:
    """A step takes 1 ms for each row."""
    steps, now = list[StepTimes](), 0.0
    for num_rows, num_tokens in SIZES:
        now += 1e-3 * num_rows
        steps.append(StepTimes(num_rows, num_tokens, now, 0, 0))
    return Run(now, 0, steps, [cast(StepPlan, i) for i in range(len(steps))])


def test_only_steps_of_the_whole_batch_count() -> None:
    assert whole_steps(run(), 4) == range(4, 8)


def test_shorter_steps_at_the_end_do_not_count_as_waiting() -> None:
    """A host that costs nothing is exposed for no time."""

    def repeat(plans: list[int], num_untimed: int) -> tuple[float, float]:
        timed = plans[num_untimed:]
        return sum(1e-3 * SIZES[i][0] for i in timed) / len(timed), 0.0

    engine: Any = SimpleNamespace(run=lambda *_: run(), repeat=repeat)
    model: Any = SimpleNamespace(vocab_size=100, kv=(), num_step_weights=1)
    found = measure(cast(LocalEngine, engine), cast(ModelConfig, model), 4, 3, 5)
    assert found["step_ms"] == pytest.approx(4)
    assert found["exposed_ms"] == pytest.approx(0, abs=1e-9)
