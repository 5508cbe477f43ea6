"""A drafter that may fail without harm: it is switched off, and the model goes on without guesses."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import structlog
from torch import Tensor

from penstock.gpu_worker.devices.device import Graphs
from penstock.gpu_worker.devices.out_of_memory import failure_reason
from penstock.gpu_worker.state.row_state import RowState
from penstock.ipc import faults
from penstock.ipc.messages import StepPlan
from penstock.parts.drafts.worker.drafter import Drafter, Guesses, Int32Array

log = structlog.get_logger()

T = TypeVar("T")


def guarded(make: Callable[[RowState], Drafter], state: RowState) -> Drafter:
    """Make a drafter, and guard it."""
    return Guarded(make(state))


class Guarded(Drafter):
    """Passes all calls on to another drafter until that fails. Not for several ranks, which must guess the same."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter: Drafter | None = drafter
        self._error = ""
        self._before = faults.point("worker.draft")
        self.traits = drafter.traits

    def ended(self, rows: Int32Array, ends: Int32Array) -> None:
        self._try(lambda drafter: drafter.ended(rows, ends), None)

    def apply(self, plan: StepPlan) -> None:
        self._try(lambda drafter: drafter.apply(plan), None)

    def guess(self, rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        """See `Drafter`."""
        nothing = Guesses(np.zeros_like(rows), np.zeros(0, dtype=np.int32))
        return self._try(lambda drafter: self._guess(drafter, rows, positions, most), nothing)

    def _guess(self, drafter: Drafter, rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        self._before()
        return drafter.guess(rows, positions, most)

    def computed(self, rows: Int32Array, start: Int32Array, num_new: Int32Array, hidden: Tensor | None) -> None:
        self._try(lambda drafter: drafter.computed(rows, start, num_new, hidden), None)

    def moved(self, rows: Int32Array, sources: Int32Array, targets: Int32Array) -> None:
        self._try(lambda drafter: drafter.moved(rows, sources, targets), None)

    def capture(self, graphs: Graphs) -> None:
        if self._drafter is not None:
            self._drafter.capture(graphs)

    def warm_up(self, contexts: Sequence[int]) -> None:
        if self._drafter is not None:
            self._drafter.warm_up(contexts)

    def take_error(self) -> str:
        error, self._error = self._error, ""
        return error

    def clear(self) -> None:
        self._try(lambda drafter: drafter.clear(), None)

    def _try(self, work: Callable[[Drafter], T], otherwise: T) -> T:
        if self._drafter is None:
            return otherwise
        try:
            return work(self._drafter)
        except Exception as error:  # any failure, since the model works without guesses
            log.exception("drafter failed")
            self._drafter, self._error = None, failure_reason(error)
            return otherwise
