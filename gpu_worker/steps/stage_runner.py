"""Steps of one stage of a pipeline: what must be there before a step, and what goes to the other stages after it.

A step is due when the stage before has handed on its hidden states and, on all stages but the last one, the tokens are
known that its rows continue with: the last stage draws them, and tells. Steps are launched in the order of their plans;
those before the last stage have no results.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from penstock.gpu_worker.grammars.store import GrammarStore
from penstock.gpu_worker.parallel.pipeline import UNKNOWN, Pipeline
from penstock.gpu_worker.steps.host_step import Passed, PendingStep
from penstock.gpu_worker.steps.model_runner import ModelRunner
from penstock.ipc.messages import StepPlan, StepResult


class _Owed(NamedTuple):
    """The tokens of a launched step, which the last stage draws."""

    passed: Passed
    is_live: npt.NDArray[np.bool_]  # [S']: whether the row still holds the sequence of that step


class _Told(NamedTuple):
    """Drawn tokens that have come, as a `Download`."""

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
        """Readable when there is something for `take` to take."""

    @property
    def grammar_store(self) -> GrammarStore:
        return self._runner.grammar_store

    def begin(self, epoch: int) -> None:
        """Another scheduler sends plans from now on, or the same one anew."""
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
        """Whether everything is there that a plan needs; it is the next one to be launched."""
        self.take()
        if not plan.rows:
            return True
        if not self._place.is_first_stage and not self._pipeline.has(plan.step_id):
            return False
        waits = self._waits[np.frombuffer(plan.rows, dtype=np.int32)]
        if not waits.any():
            return True
        new = [new.row for new in plan.new_rows]  # in place of sequences whose tokens nobody needs
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
        """Rows that end, or that others take: what is still drawn for them must not be written there."""
        rows = np.frombuffer(plan.freed_rows, dtype=np.int32)
        if plan.new_rows:
            rows = np.concatenate((rows, np.array([new.row for new in plan.new_rows], dtype=np.int32)))
        if rows.shape[0] and self._owed:
            self._waits[rows] = False
            for owed in self._owed.values():
                owed.is_live[np.isin(owed.passed.rows, rows)] = False

    def _note(self, owed: _Owed, tokens: bytes) -> None:
        """The last stage has drawn a step's tokens."""
        (_, rows, positions, note), is_live = owed
        if note is not None:
            note(_Told(tokens))
        if not is_live.any():
            return
        drawn = np.frombuffer(tokens, dtype=np.int32)[is_live].clip(min=0)  # without a token a row ends
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
        """Its result, once the other stages are told the tokens; its time is that of all stages."""
        if tokens := self.step.tokens:
            self.pipeline.tell(self.step_id, tokens)
        result = self.step.result()
        num_us = result.num_forward_us
        is_known = self.num_us_before != UNKNOWN
        num_us = num_us + self.num_us_before if is_known else num_us * self.pipeline.place.num_stages
        return replace(result, num_forward_us=num_us)
