"""Steps of one stage of a pipeline: what a step needs from other stages, and what it sends to them.

A step is due when the stage before has sent its hidden states. On all stages but the last one, the tokens that its rows
continue with must be known, too: the last stage draws them and sends them. Steps are launched in the order of their
plans. Only the last stage returns results.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from penstock.gpu_worker.parallel.pipeline import UNKNOWN, Pipeline
from penstock.gpu_worker.steps.host_step import Passed, PendingStep
from penstock.gpu_worker.steps.model_runner import ModelRunner
from penstock.ipc.messages import StepPlan, StepResult


class _Owed(NamedTuple):
    """The tokens of a launched step that the last stage has yet to draw."""

    passed: Passed
    is_live: npt.NDArray[np.bool_]  # [S']: whether the row still holds the sequence of that step


class _Told(NamedTuple):
    """Drawn tokens that have arrived, as a `Download`."""

    tokens: bytes

    def is_ready(self) -> bool:
        return True

    def wait(self) -> bytes:
        return self.tokens


class StageRunner:
    """See `Runner` of the worker's loop."""

    def __init__(self, runner: ModelRunner, pipeline: Pipeline, num_rows: int) -> None:
        self._runner = runner
        self._pipeline = pipeline
        self._place = pipeline.place
        self._owed: dict[int, _Owed] = {}  # by step
        self._waits = np.zeros(num_rows, dtype=np.bool_)  # rows whose next token is not known here
        self.inbox = pipeline.inbox
        """Readable when `take` has something to take."""

    def begin(self, epoch: int) -> None:
        """A new scheduler sends plans from now on, or the same one has started over."""
        self._pipeline.begin(epoch)

    def clear_rows(self) -> None:
        self._owed.clear()
        self._waits[:] = False
        self._runner.clear_rows()

    def close(self) -> None:
        """Leave the pipeline."""
        self._pipeline.close()

    def take(self) -> None:
        """Take what other stages have sent, so that the inbox is empty."""
        self._pipeline.take()
        for step_id, tokens in self._pipeline.take_tokens():
            self._note(self._owed.pop(step_id), tokens)

    def is_due(self, plan: StepPlan) -> bool:
        """Whether everything that a plan needs is there. The plan must be the next one to launch."""
        self.take()
        if not plan.rows:
            return True
        if not self._place.is_first_stage and not self._pipeline.has(plan.step_id):
            return False
        waits = self._waits[np.frombuffer(plan.rows, dtype=np.int32)]
        if not waits.any():
            return True
        new = [new.row for new in plan.new_rows]  # the tokens of the sequences that they replace are not needed
        return bool(np.isin(np.frombuffer(plan.rows, dtype=np.int32)[waits], new).all())

    def launch(self, plan: StepPlan) -> "PendingStep | _LastStep":
        """Do this stage's part of a plan that is due."""
        self._forget(plan)
        handed = None if self._place.is_first_stage or not plan.rows else self._pipeline.handed(plan.step_id)
        step = self._runner.launch(plan, None if handed is None else handed.hidden)
        if self._place.is_last_stage:
            return _LastStep(step, self._pipeline, 0 if handed is None else handed.num_us)
        if (passed := step.passed) is not None:
            num_us = step.num_us_if_done
            before = 0 if handed is None else handed.num_us
            together = UNKNOWN if num_us is None or before == UNKNOWN else before + num_us
            self._pipeline.hand_on(plan.step_id, passed.hidden, together)
            if passed.rows.shape[0]:
                self._owed[plan.step_id] = _Owed(passed, np.ones(passed.rows.shape[0], dtype=np.bool_))
                self._waits[passed.rows] = True
        return step

    def _forget(self, plan: StepPlan) -> None:
        """Rows that a plan frees or gives to new sequences: tokens still to be drawn must not be written to them."""
        rows = np.frombuffer(plan.freed_rows, dtype=np.int32)
        if plan.new_rows:
            rows = np.concatenate((rows, np.array([new.row for new in plan.new_rows], dtype=np.int32)))
        if rows.shape[0] and self._owed:
            self._waits[rows] = False
            for owed in self._owed.values():
                owed.is_live[np.isin(owed.passed.rows, rows)] = False

    def _note(self, owed: _Owed, tokens: bytes) -> None:
        """Take a step's tokens, which the last stage has drawn."""
        (_, rows, positions, note), is_live = owed
        if note is not None:
            note(_Told(tokens))
        if not is_live.any():
            return
        drawn = np.frombuffer(tokens, dtype=np.int32)[is_live].clip(min=0)  # negative: no token, so the row ends
        self._waits[rows[is_live]] = False
        self._runner.write_drawn(rows[is_live], positions[is_live], drawn)


class _LastStep(NamedTuple):
    """A launched step of the last stage."""

    step: PendingStep
    pipeline: Pipeline
    num_us_before: int  # in the stages before

    @property
    def step_id(self) -> int:
        return self.step.step_id

    def is_ready(self) -> bool:
        return self.step.is_ready()

    def result(self) -> StepResult:
        """Send the tokens to the other stages, then return the result; its time covers all stages."""
        if tokens := self.step.tokens:
            self.pipeline.tell(self.step_id, tokens)
        result = self.step.result()
        num_us = result.num_forward_us
        is_known = self.num_us_before != UNKNOWN
        num_us = num_us + self.num_us_before if is_known else num_us * self.pipeline.place.num_stages
        return replace(result, num_forward_us=num_us)
