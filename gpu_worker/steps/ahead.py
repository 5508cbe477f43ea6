"""What works ahead of the model: it lets decodes compute more positions than their own, where plans allow it.

    load            beside the model's weights
    attach          rows and pages exist

    begin           rows are about to come and go              in each step
    expand          the positions to compute, and who says which of their draws count
    computed        ◀─ the hidden states
    sends           what the result says beside tokens

At most one part does so. Without one nothing is asked in a step.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from penstock.config import Config
from penstock.config.parts import brought
from penstock.config.ranks import Rank
from penstock.gpu_worker.devices.device import Device, Download, Graphs, Int32Array
from penstock.gpu_worker.models.model import Model
from penstock.gpu_worker.state.kv_pool import KVPool, KVType, PageGroup
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.host_step import HostBatch, Put
from penstock.gpu_worker.steps.row_part import RowPart
from penstock.ipc.messages import RowError, StepPlan, StepResult, WorkerHello
from penstock.models.description.model_config import ModelConfig


class Target(NamedTuple):
    """The model, before its rows and pages exist."""

    config: Config
    model_config: ModelConfig
    model: Model
    dtype: torch.dtype
    device: Device


class Place(NamedTuple):
    """The model with its rows and pages."""

    model: Model
    state: RowState
    kv: KVPool
    device: Device


class Computed(NamedTuple):
    """A model that computes batches, with its page groups and the type of its KV."""

    model: Model
    groups: tuple[PageGroup, ...]
    kv: KVType


class Expanded(Protocol):
    """A step in which rows may return several tokens: S' draws for S rows."""

    guesses: Int32Array
    """[S'], the guess that follows each draw; negative after a row's last one."""

    download: Download | None
    """It begins with int32[S'], the sampled tokens; set once the step is launched."""

    def drawn(self, tokens: Download) -> None:
        """Take the step's tokens, which another stage has drawn."""

    def finish(self, result: StepResult, row_errors: tuple[RowError, ...]) -> StepResult:
        """Reduce a result with all draws to those that count; blocks until the device has sampled."""


class Ahead:
    """What one runner has of it. It overrides the methods that it needs."""

    wants: Mapping[str, int] = {}
    """What it wants of steps that are one call: how many states of each position, by their names in `Compute`."""

    def judge_by(self, parts: Sequence[RowPart]) -> None:
        """Let these parts judge the guesses for their rows; they override `RowPart.extend`."""

    def begin(self, plan: StepPlan) -> None:
        """Rows and pages are about to change."""

    def expand(self, plan: StepPlan, batch: HostBatch) -> tuple[HostBatch, Expanded | None]:
        """The batch to compute, at the rows' true places. Rows and pages are those of the plan."""
        return batch, None

    def computed(self, batch: HostBatch, hidden: Tensor | None, taps: Tensor | None) -> None:
        """The model has computed a batch.

        Args:
            batch: as expanded; T positions.
            hidden: the final hidden states, [T, H]; None if they were not wanted.
            taps: other states that were wanted, [T, n * H].
        """

    def sends(self) -> Put | None:
        """What the result says beside tokens; called when the step has been launched."""
        return None

    def capture(self, graphs: Graphs) -> None:
        """Capture what it launches in every step, if that can be captured. The dummy row has its page by now."""

    def warm_up(self, contexts: Sequence[int]) -> None:
        """Launch all its kernels, at these lengths of a sequence; no row is in use."""

    def clear(self) -> None:
        """Forget all rows."""


class AheadPart:
    """What is loaded for it. This class is that of a worker which computes one position of each decode."""

    most = 0
    """Most positions that a decode computes beyond its own."""

    page_bytes = 0
    """Bytes that it keeps for each page of the model, in a page with the same number."""

    row_bytes = 0
    """Bytes that it keeps for each row."""

    beside: Computed | None = None
    """A model of its own that computes batches as large as the target's, so its activations need memory, too."""

    @classmethod
    def load(cls, target: Target) -> Self | None:
        """Load what it needs beside the model; None if it is not wanted.

        Raises:
            ConfigError: it does not suit the model.
        """
        return None

    def attach(self, place: Place, num_pages: int, rank: Rank) -> Ahead | None:
        """Begin to work for this model."""
        return None

    def hello(self, hello: WorkerHello) -> WorkerHello:
        """Return the hello with what the scheduler must know of it."""
        return hello


def load_ahead(target: Target) -> AheadPart:
    """Load what works ahead of this model, if anything does.

    Raises:
        ConfigError: it does not suit the model.
    """
    found = (kind.load(target) for kind in brought("worker", AheadPart))
    return next(filter(None, found), AheadPart())
