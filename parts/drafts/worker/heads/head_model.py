"""A head as a model: at position i it gets the model's hidden state there, and token i + 1."""

import numpy as np
from torch import Tensor

from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.model import ForwardInputs, Model
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.gpu_worker.state.row_state import RowState
from penstock.kernels.native.program.chain import HeadChain, Kept, Output
from penstock.kernels.norms import NormWeights, norm
from penstock.kernels.prepare_inputs import prepare_inputs
from penstock.parts.drafts.worker.drafter import Int32Array
from penstock.parts.drafts.worker.pages import uncounted


class HeadModel:
    """Computes positions of rows; its keys and values are in pages of its own."""

    def __init__(self, layers: Model, kv: KVPool, state: RowState, device: Device, max_model_len: int) -> None:
        num_rows = state.token_ids.shape[0]
        layers.prepare(device, num_rows, max_model_len)
        self._layers = layers
        self._kv = kv
        self._state = state
        self._device = device
        self._step = layers.whole_step(state.token_ids[:, 1:], [state.page_table], kv)
        self._no_samples = np.empty(0, dtype=np.int64)

    def enter_row(self, row: int, num_prompt_tokens: int) -> None:
        """A sequence enters a row."""
        self._layers.enter_row(row, num_prompt_tokens)

    def compute(self, rows: Int32Array, start: Int32Array, num_new: Int32Array, given: Tensor) -> Tensor:
        """Compute N rows, each once.

        Args:
            rows: int32[N].
            start: int32[N], their first positions; the next token of each position is known.
            num_new: int32[N], how many positions each computes.
            given: [T, H], the model's hidden state of each position; overwritten.

        Returns:
            [T, H], what stands in for `given` at the next positions.
        """
        with uncounted(self._device):
            if self._step is not None and given.shape[0] <= self._step.max_tokens:
                return self._step.compute(rows, start, num_new, self._no_samples, given)
            return self._layers.forward(self._inputs(rows, start, num_new)._replace(given=given), self._kv)

    def chain(self, output: Output, kept: Kept) -> HeadChain | None:
        """An object that computes all guesses of a step in one call, if native CPU kernels compute these layers."""
        step, library = self._step, self._device.library
        if step is None or step.program is None or library is None:
            return None
        return HeadChain(library, step.program, output, kept)

    def _inputs(self, rows: Int32Array, start: Int32Array, num_new: Int32Array) -> ForwardInputs:
        """As for the model, except that the tokens are those of the next positions."""
        state, page_size, num_tokens = self._state, self._kv.page_size, int(num_new.sum())
        batch = self._device.upload(np.stack((rows, start, num_new, start + 1)))
        ids = prepare_inputs(batch[0], batch[3], batch[2], num_tokens, state.token_ids, state.page_table, page_size)
        step = prepare_inputs(batch[0], batch[1], batch[2], num_tokens, state.token_ids, state.page_table, page_size)
        return ForwardInputs(
            input_ids=ids.input_ids,
            positions=step.positions,
            rows=batch[0],
            slot_mapping=step.slot_mapping,
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            page_table=state.page_table.index_select(0, batch[0]),
            max_query_len=int(num_new.max()),
            max_seq_len=int((start + num_new).max()),
            host_lens=(num_new, start + num_new),
        )


def normed(hidden: Tensor, weights: NormWeights | None) -> Tensor:
    """The input of an output matrix: hidden states after the norm, if there is one."""
    return hidden if weights is None else norm(hidden, weights)
