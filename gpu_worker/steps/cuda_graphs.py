"""CUDA graphs of decode steps: one launch instead of a few hundred.

A graph covers a step from its row ids to its hidden states, for a fixed number of rows with one new token
each. The logits are computed outside the graph, because every graph keeps its own result tensors, and the
logits of a large vocabulary would take GiB.
A graph reads the row state and writes the KV pool like an eager step. It reads lengths from device memory, so
one graph serves every context length up to `max_model_len`. A smaller batch is padded with the dummy row. That
row's page table contains only the dummy page, so nothing reads what the padding computes.

Sizes are captured largest first and share one memory pool: at any time only one graph's tensors are in use,
because steps run one after the other on one stream.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.gpu_worker.devices.device import Device, Graphs
from penstock.gpu_worker.models.model import HandsOutLayers, Model
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.host_step import HostBatch
from penstock.gpu_worker.steps.input_batch import SamplingRows, gather_inputs
from penstock.models.description.decoder import Decoder

MAX_GRAPH_ROWS = 512
"""Larger decode batches are bound by the device even when launched kernel by kernel."""


def graph_sizes(most_rows: int) -> list[int]:
    """Rows of the graphs, largest first: 1, 2, 4, 8, then every 8 up to 256 and every 32 beyond.

    The spacing limits the waste by padding; vLLM and SGLang use about the same.
    """
    most = min(most_rows, MAX_GRAPH_ROWS)
    sizes = {size for size in (1, 2, 4, *range(8, 257, 8), *range(288, MAX_GRAPH_ROWS + 1, 32)) if size < most}
    return sorted(sizes | {most}, reverse=True)


class _Graph(NamedTuple):
    """One captured size B, with its input and output tensors."""

    replay: Callable[[], object]
    batch: Tensor  # int32[2, B]: rows, start
    given: Tensor | None  # [B, H], for a pipeline stage after the first
    hidden: Tensor  # [B, H]
    sampling: SamplingRows
    tapped: Tensor | None  # [B, n * H]: see `HandsOutLayers`


def is_decode(batch: HostBatch) -> bool:
    """Whether a step has one new token per row, and all of them sample."""
    num_rows: int = batch.rows.shape[0]
    return num_rows == batch.sample_idx.shape[0] and num_rows == int(batch.num_new.sum())


def padded_batch(batch: HostBatch, size: int, dummy_row: int) -> npt.NDArray[np.int32]:
    """int32 [2, size]: the batch's rows and starts, then the dummy row at position 0."""
    n = batch.rows.shape[0]
    padded = np.empty((2, size), dtype=np.int32)
    padded[0, :n], padded[0, n:] = batch.rows, dummy_row
    padded[1, :n], padded[1, n:] = batch.start, 0
    return padded


class DecodeGraphs:
    """Captured decode steps of one runner."""

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        state: RowState,
        graphs: Graphs,
        device: Device,
        *,
        dummy_row: int,
        most_rows: int,
        max_model_len: int,
        dtype: torch.dtype,
    ) -> None:
        """`most_rows` of a step, where each draft token of a sequence has one. `dtype`: of activations."""
        self._model = model
        self._kv = kv
        self._state = state
        self._recorder = graphs
        self._torch_device = device.torch_device
        self._dummy_row = dummy_row
        self._max_model_len = max_model_len
        self._dtype = dtype
        self._page_size = kv.page_size
        self._sizes = graph_sizes(most_rows)
        self._graphs: dict[int, _Graph] = {}
        self._size_for = np.zeros(self._sizes[0] + 1, dtype=np.int64)  # num rows -> graph size
        for size in self._sizes:
            self._size_for[: size + 1] = size

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, largest first."""
        for size in self._sizes:
            batch = torch.ones((3, size), dtype=torch.int32, device=self._torch_device)
            batch[0], batch[1] = self._dummy_row, 0
            given = self._given(size)
            replay, (hidden, sampling, tapped) = self._recorder.capture(partial(self._step, batch, given))
            self._graphs[size] = _Graph(replay, batch[:2], given, hidden, sampling, tapped)

    def covers(self, batch: HostBatch) -> bool:
        """Whether a step can be replayed."""
        return batch.rows.shape[0] <= self._sizes[0] and is_decode(batch) and batch.paths is None

    def replay(self, batch: HostBatch, given: Tensor | None = None) -> tuple[Tensor, SamplingRows]:
        """Run a decode step of N rows; `given` as in `ForwardInputs`.

        Returns:
            Hidden states [N, H] and where the sampled tokens go: views that a later replay overwrites.
        """
        n = batch.rows.shape[0]
        size = int(self._size_for[n])
        graph = self._graphs[size]
        self._recorder.upload_into(padded_batch(batch, size, self._dummy_row), graph.batch)
        if graph.given is not None and given is not None:
            graph.given[:n].copy_(given)
        graph.replay()
        if graph.tapped is not None and isinstance(self._model, HandsOutLayers):
            self._model.tapped = graph.tapped[:n]
        sampling = graph.sampling
        return graph.hidden[:n], SamplingRows(sampling.logits_indices[:n], sampling.rows[:n], sampling.positions[:n])

    def _given(self, size: int) -> Tensor | None:
        config = self._model.config
        if not isinstance(config, Decoder) or config.shard is None or config.shard.place.is_first_stage:
            return None
        return torch.zeros(size, config.hidden_size, dtype=self._dtype, device=self._torch_device)

    def _step(self, batch: Tensor, given: Tensor | None) -> tuple[Tensor, SamplingRows, Tensor | None]:
        inputs, sampling = gather_inputs(
            batch,
            self._state,
            self._page_size,
            num_tokens=batch.shape[1],
            num_pages=None,
            max_query_len=1,
            max_seq_len=self._max_model_len,
        )
        # The residual stream is added to in place. `given` itself must stay as it is, for the next replay's padding.
        inputs = inputs._replace(given=None if given is None else given.clone())
        hidden = self._model.forward(inputs, self._kv)
        return hidden, sampling, self._model.tapped if isinstance(self._model, HandsOutLayers) else None
