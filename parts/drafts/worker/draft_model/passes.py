"""Forward passes of a draft model over the rows of the model's state."""

import torch
from torch import Tensor

from penstock.gpu_worker.devices.device import Device, Graphs
from penstock.gpu_worker.models.model import Model
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.cuda_graphs import DecodeGraphs
from penstock.gpu_worker.steps.host_step import HostBatch
from penstock.gpu_worker.steps.input_batch import make_inputs
from penstock.parts.drafts.worker.drafter import Int32Array, Int64Array
from penstock.parts.drafts.worker.pages import uncounted


class DraftPasses:
    """Computes batches that the drafter makes up."""

    def __init__(
        self, model: Model, kv: KVPool, state: RowState, device: Device, dtype: torch.dtype, max_len: int
    ) -> None:
        """`kv` has one page group; `dtype` is the activations' dtype, `max_len` the longest sequence."""
        self._kv = kv
        self._model = model
        self._state = state
        self._device = device
        self._dtype = dtype
        self._max_len = max_len
        self._graphs: DecodeGraphs | None = None
        num_rows = state.token_ids.shape[0]
        model.prepare(device, num_rows, max_len)
        self._whole_step = model.whole_step(state.token_ids, [state.page_table], kv)

    def enter_row(self, row: int, num_prompt_tokens: int) -> None:
        """A sequence enters a row."""
        self._model.enter_row(row, num_prompt_tokens)

    def capture(self, graphs: Graphs) -> None:
        """Capture what passes launch."""
        if not self._model.can_be_captured:
            return
        num_rows = self._state.token_ids.shape[0] - 1
        self._graphs = DecodeGraphs(
            *(self._model, self._kv, self._state, graphs, self._device),
            dummy_row=num_rows,
            most_rows=num_rows,
            max_model_len=self._max_len,
            dtype=self._dtype,
        )
        self._graphs.capture()

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
        with uncounted(self._device):
            if self._whole_step is not None and int(num_new.sum()) <= self._whole_step.max_tokens:
                return self._whole_step.compute(rows, start, num_new, samples)
            batch = HostBatch(rows, start, num_new, samples)
            if self._graphs is not None and self._graphs.covers(batch):
                hidden, sampling = self._graphs.replay(batch)
            else:
                inputs, sampling = make_inputs(batch, self._state, self._device, self._kv.page_size)
                hidden = self._model.forward(inputs._replace(others=()), self._kv)
                hidden = hidden.index_select(0, sampling.logits_indices)
            return self._model.logits(hidden) if samples.shape[0] else hidden
