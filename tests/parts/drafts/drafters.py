"""Drafters of runners in tests."""

from collections.abc import Callable
from functools import partial

from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.model_runner import ModelRunner
from penstock.parts.drafts.worker.drafter import Drafter
from penstock.parts.drafts.worker.part import DraftsAhead


def draft_with(runner: ModelRunner, make: Callable[[RowState], Drafter]) -> None:
    """Let this drafter guess, where plans allow it."""
    runner.work_ahead(partial(DraftsAhead, make=make))


def drafter_of(runner: ModelRunner) -> Drafter:
    """It has one."""
    (ahead,) = runner._ahead
    assert isinstance(ahead, DraftsAhead)
    return ahead.drafter
