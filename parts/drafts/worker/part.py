"""The drafter of a worker: loaded beside the model, and asked in each step for which a plan allows drafts."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Self

import structlog
from msgspec.structs import replace
from torch import Tensor

from penstock.config.ranks import Rank
from penstock.gpu_worker.devices.device import Graphs
from penstock.gpu_worker.devices.out_of_memory import no_memory_for
from penstock.gpu_worker.models.model import HandsOutLayers
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.ahead import Ahead, AheadPart, Expanded, Place, Target
from penstock.gpu_worker.steps.host_step import HostBatch, Put
from penstock.gpu_worker.steps.row_part import RowPart
from penstock.ipc.messages import StepPlan, StepResult, WorkerHello
from penstock.parts.drafts.options import DraftOptions
from penstock.parts.drafts.speculative import SpeculativeConfig
from penstock.parts.drafts.worker.drafter import Drafter
from penstock.parts.drafts.worker.drafts import Drafts
from penstock.parts.drafts.worker.guarded import guarded
from penstock.parts.drafts.worker.prepared import Prepared
from penstock.parts.drafts.worker.registry import prepare_drafter
from penstock.parts.drafts.worker.trees import Moves, why_no_trees

log = structlog.get_logger()


class DraftsPart(AheadPart):
    """A drafter with its weights loaded."""

    def __init__(self, speculative: SpeculativeConfig, prepared: Prepared) -> None:
        self._method = speculative.method
        self._make = prepared.make
        self.most = speculative.num_speculative_tokens
        self.page_bytes = prepared.page_bytes
        self.row_bytes = prepared.row_bytes
        self.beside = prepared.computed

    @classmethod
    def load(cls, target: Target) -> Self | None:
        speculative = target.config.of(DraftOptions).speculative
        if speculative is None:
            return None
        with no_memory_for("the drafter's weights", "choose a smaller drafter, or none"):
            return cls(speculative, prepare_drafter(speculative, target))

    def attach(self, place: Place, num_pages: int, rank: Rank) -> "DraftsAhead":
        make = partial(self._make, num_pages)
        return DraftsAhead(place, make if rank.num_ranks > 1 else partial(guarded, make))

    def hello(self, hello: WorkerHello) -> WorkerHello:
        return replace(hello, drafter=self._method, max_drafts=self.most, draft_page_bytes=self.page_bytes)


class DraftsAhead(Ahead):
    """A drafter at work."""

    def __init__(self, place: Place, make: Callable[[RowState], Drafter]) -> None:
        self._model, self._state = place.model, place.state
        place.state.keep_mirror()
        self.drafter = make(place.state)
        self._drafts = Drafts(place.state, place.state.token_ids.shape[0])
        self._drafts.draft_with(self.drafter, self._moves(place))
        self.wants = _wanted(self.drafter)

    def _moves(self, place: Place) -> Moves | None:
        """For drafters that guess trees, if the model can compute trees."""
        if not self.drafter.traits.guesses_trees:
            return None
        if reason := why_no_trees(place.model.config):
            log.warning("tree drafts unavailable, using chains", reason=reason)
            return None
        return Moves(place.state, place.kv, place.device)

    def judge_by(self, parts: Sequence[RowPart]) -> None:
        self._drafts.judge_by(parts)

    def begin(self, plan: StepPlan) -> None:
        if self.drafter.traits.wants_ended:
            self._drafts.end(plan)
        if self._drafts.is_busy:
            self._drafts.begin(plan)

    def expand(self, plan: StepPlan, batch: HostBatch) -> tuple[HostBatch, Expanded | None]:
        if plan.new_rows:
            self._drafts.enter(plan.new_rows)
        self.drafter.apply(plan)
        keeps_tokens = self._state.mirror is not None or self.drafter.traits.wants_ended
        if plan.num_drafts or plan.start_bounds or keeps_tokens:
            return self._drafts.expand(plan, batch)
        return batch, None

    def computed(self, batch: HostBatch, hidden: Tensor | None, taps: Tensor | None) -> None:
        if taps is None and self.drafter.traits.num_taps and isinstance(self._model, HandsOutLayers):
            taps = self._model.tapped
        self.drafter.computed(batch.rows, batch.start_places, batch.num_new, hidden if taps is None else taps)

    def sends(self) -> Put | None:
        error = self.drafter.take_error()
        return partial(_with_error, error) if error else None

    def capture(self, graphs: Graphs) -> None:
        self.drafter.capture(graphs)

    def warm_up(self, contexts: Sequence[int]) -> None:
        self.drafter.warm_up(contexts)

    def clear(self) -> None:
        self._drafts.clear()
        self.drafter.clear()


def _wanted(drafter: Drafter) -> Mapping[str, int]:
    """As `Ahead.wants`."""
    traits = drafter.traits
    if not traits.wants_hidden:
        return {}
    return {"taps": traits.num_taps} if traits.num_taps else {"hidden": 1}


def _with_error(error: str, result: StepResult, sent: bytes) -> StepResult:
    return replace(result, drafter_error=error)
