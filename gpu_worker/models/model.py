"""What the runner drives: the interface of models, and their inputs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock.core.checkpoint.model_config import ModelConfig
from penstock.gpu_worker.devices.device import Device, IntArray
from penstock.gpu_worker.state.kv_pool import KVPool

Int32Array = npt.NDArray[np.int32]


class GroupInputs(NamedTuple):
    """Where a step's tokens are in the pages of one group."""

    slot_mapping: Tensor  # int64[T]
    page_table: Tensor  # int32[N, max_pages]; entries behind a group's window are arbitrary pages


class ForwardInputs(NamedTuple):
    """One step's ragged batch (T tokens, N rows)."""

    input_ids: Tensor  # int32[T]
    positions: Tensor  # int64[T]
    rows: Tensor  # int32[N], the index of each batch row in the row state
    slot_mapping: Tensor  # int64[T], in the first page group
    query_start_loc: Tensor  # int32[N + 1]
    seq_lens: Tensor  # int32[N]
    page_table: Tensor  # int32[N, max_pages], of the first page group
    max_query_len: int
    max_seq_len: int
    others: tuple[GroupInputs, ...] = ()  # of the page groups after the first
    host_lens: tuple[IntArray, IntArray] | None = None
    """Of each row, its new tokens and its length with them, on the host; None in captured graphs, which serve any."""

    def of_group(self, number: int) -> "ForwardInputs":
        """The same with the slots and the page table of another group."""
        return self if number == 0 else self._replace(**self.others[number - 1]._asdict())


class WholeStep(NamedTuple):
    """A step that is one call, from rows to logits, without hidden states in between."""

    compute: Callable[[Int32Array, Int32Array, Int32Array, IntArray], Tensor]
    """(rows int32[N], their first positions, how many each computes, int64[S]: which of the N sample) -> fp32[S, V]."""
    max_tokens: int
    """Steps with more tokens go through `Model.forward`."""


class Model(Protocol):
    """A family's model. It is made by `build(config, reader)`, a function that the family's registration names."""

    @property
    def config(self) -> ModelConfig:
        """What its config.json says."""

    @property
    def kernels(self) -> str:
        """What computes it, as one word for the log."""

    @property
    def can_be_captured(self) -> bool:
        """Whether `forward` may run inside a captured CUDA graph."""

    def prepare(self, device: Device, num_rows: int, max_model_len: int) -> None:
        """Allocate what depends on the number of rows or the longest sequence; call this before the first step."""

    def enter_row(self, row: int, num_prompt_tokens: int) -> None:
        """A sequence enters a row."""

    def forward(self, inputs: ForwardInputs, kv: KVPool) -> Tensor:
        """Compute a batch.

        Args:
            inputs: the batch.
            kv: where keys and values are written, and earlier ones read.

        Returns:
            [T, H], the final hidden states, normed: what `logits` takes.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] of the rows that sample -> [S, V]. The result's device and dtype decide how tokens are sampled."""

    def whole_step(self, token_ids: Tensor, page_tables: Sequence[Tensor], kv: KVPool) -> WholeStep | None:
        """Return a faster path from these tables to logits, if the model has one.

        Args:
            token_ids: int32[R, L], known and sampled ids by position.
            page_tables: int32[R, max_pages] of each page group.
            kv: as in `forward`.
        """
