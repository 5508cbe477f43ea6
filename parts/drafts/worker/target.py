"""What drafters are made from: the model for which they guess, and what exists at each point of a start."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.config import Config
from penstock.gpu_worker.devices.device import Device, Graphs
from penstock.gpu_worker.models.model import Model
from penstock.gpu_worker.state.kv_pool import KVPool, KVType, PageGroup
from penstock.gpu_worker.state.row_state import RowState
from penstock.models.description.model_config import ModelConfig
from penstock.parts.drafts.worker.drafter import Drafter, Int32Array

Int64Array = npt.NDArray[np.int64]


class Computed(NamedTuple):
    """A model that computes batches, with its page groups and the type of its KV."""

    model: Model
    groups: tuple[PageGroup, ...]
    kv: KVType


class Passes(Protocol):
    """Forward passes of a draft model over the rows of the model's state."""

    def enter_row(self, row: int, num_prompt_tokens: int) -> None:
        """A sequence enters a row."""

    def capture(self, graphs: Graphs) -> None:
        """Capture what passes launch."""

    def compute(self, rows: Int32Array, start: Int32Array, num_new: Int32Array, samples: Int64Array) -> Tensor:
        """Compute N rows.

        Args:
            rows: int32[N].
            start: int32[N], their first positions.
            num_new: int32[N], how many positions each computes.
            samples: int64[S], which of the N are sampled from.

        Returns:
            Logits, [S, V].
        """


class MakePasses(Protocol):
    """Makes `Passes`."""

    def __call__(
        self, model: Model, kv: KVPool, state: RowState, device: Device, dtype: torch.dtype, max_len: int
    ) -> Passes:
        """`kv` has one page group; `dtype` is the activations' dtype, `max_len` the longest sequence."""


class Target(NamedTuple):
    """The model, before its rows and pages exist."""

    config: Config
    model_config: ModelConfig
    model: Model
    dtype: torch.dtype
    device: Device
    passes: MakePasses


class Prepared(NamedTuple):
    """A drafter with its weights loaded."""

    make: Callable[[int, RowState], Drafter]  # from the number of pages, and the rows
    page_bytes: int = 0
    """Bytes that it keeps for each page of the model, in a page with the same number."""
    computed: Computed | None = None
    """A model of the drafter that computes batches as large as the target's, so its activations need memory, too."""
    row_bytes: int = 0
    """Bytes that it keeps for each row."""
