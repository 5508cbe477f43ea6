"""CUDA graphs of steps that compute chunks of prompts, alone or beside decodes.

Launched kernel by kernel, such a step takes the host as long as it takes a GPU to compute some hundreds or thousands of
tokens. So steps up to that size are captured, for some numbers of tokens and of rows. What a step has less is padded:
the missing tokens are a chunk of the dummy row, which reads and writes only the dummy page, and the missing rows have
no tokens. Grids follow from the captured sizes; lengths and pages are read on the device, as in graphs of decodes.
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

_NUM_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
MOST_GRAPH_TOKENS = _NUM_TOKENS[-1]
_NUM_ROWS = (8, 64)
"""Attention splits the contexts of a few rows more finely than those of many."""

_ENOUGH_PRODUCTS = 100_000_000_000
"""Multiplications in a layer that take a large GPU about as long as the host takes to launch the layer: 0.4 ms on a
machine with an H100, which launched steps of 28 layers in 11 ms on average."""


class GraphSize(NamedTuple):
    """The size of a graph: T tokens, R rows."""

    num_tokens: int
    num_rows: int


class Computed(NamedTuple):
    """What a step has computed: views that a later replay overwrites."""

    hidden: Tensor  # [T, H]
    sampled: Tensor  # [S, H], of the rows that sample
    sampling: SamplingRows


def can_mix(model: Model, kv: KVPool) -> bool:
    """Whether steps with chunks can be captured.

    They cannot if layers keep states, whose kernels need to know the longest chunk; if rows with latents choose how to
    read them by their lengths; if experts are spread over ranks, which exchange as many rows as a step has; or if
    another stage of a pipeline gives a step's input.
    """
    config = model.config
    return (
        isinstance(config, Decoder)
        and kv.states is None
        and all(group.has_values for group in kv.groups)
        and not model.held_experts
        and (config.shard is None or config.shard.place.num_stages == 1)
    )


def mixed_sizes(config: Decoder, max_num_batched_tokens: int, most_rows: int, max_model_len: int) -> list[GraphSize]:
    """The sizes to capture, largest first.

    Args:
        config: of the model; the larger its layers are, the sooner a step takes the device longer than the host.
        max_num_batched_tokens: most tokens of a step.
        most_rows: most rows of a step.
        max_model_len: most tokens of a row.
    """
    per_layer = (config.num_step_weights - config.hidden_size * config.vocab_size) // max(1, len(config.layers))
    most = min(max_num_batched_tokens, _NUM_TOKENS[-1])
    sizes: list[GraphSize] = []
    for num_tokens in (*(size for size in _NUM_TOKENS if size < most), most):
        rows = {min(num_rows, num_tokens, most_rows + 1) for num_rows in (*_NUM_ROWS, most_rows + 1)}
        sizes += [GraphSize(num_tokens, its) for its in sorted(rows) if num_tokens <= its * max_model_len]
        if num_tokens * per_layer >= _ENOUGH_PRODUCTS:
            break
    return sizes[::-1]


def padded_mixed(batch: HostBatch, size: GraphSize, dummy_row: int) -> npt.NDArray[np.int32]:
    """int32 [4, R]: the rows, starts and numbers of new tokens, padded; and which rows sample, padded with 0."""
    n, s = batch.rows.shape[0], batch.sample_idx.shape[0]
    padded = np.zeros((4, size.num_rows), dtype=np.int32)
    padded[0, :n], padded[0, n:] = batch.rows, dummy_row
    padded[1, :n] = batch.start
    padded[2, :n] = batch.num_new
    if missing := size.num_tokens - int(batch.num_new.sum()):
        padded[2, n] = missing
    padded[3, :s] = batch.sample_idx
    return padded


class _Graph(NamedTuple):
    """One captured size, with its input and output tensors."""

    replay: Callable[[], object]
    batch: Tensor  # int32[4, R]
    hidden: Tensor  # [T, H]
    sampled: Tensor  # [R, H]
    sampling: SamplingRows
    tapped: Tensor | None  # [T, n * H]: see `HandsOutLayers`


class MixedGraphs:
    """Captured steps with chunks of one runner."""

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        state: RowState,
        graphs: Graphs,
        device: Device,
        *,
        dummy_row: int,
        sizes: list[GraphSize],
        max_model_len: int,
    ) -> None:
        """`sizes`: to capture, in this order."""
        self._model = model
        self._kv = kv
        self._state = state
        self._recorder = graphs
        self._torch_device = device.torch_device
        self._dummy_row = dummy_row
        self._max_model_len = max_model_len
        self._graphs: dict[GraphSize, _Graph] = {}
        self._sizes = sizes
        self._ascending = sorted(sizes)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size."""
        for size in self._sizes:
            batch = torch.zeros((4, size.num_rows), dtype=torch.int32, device=self._torch_device)
            num_tokens, more = divmod(size.num_tokens, size.num_rows)
            batch[0], batch[2] = self._dummy_row, num_tokens
            batch[2, :more] += 1
            replay, outputs = self._recorder.capture(partial(self._step, batch, size.num_tokens))
            self._graphs[size] = _Graph(replay, batch, *outputs)

    @property
    def num_sizes(self) -> int:
        """How many sizes there are."""
        return len(self._sizes)

    def size_for(self, batch: HostBatch) -> GraphSize | None:
        """The smallest size that a step fits; None if it must be computed without a graph."""
        if batch.paths is not None:
            return None
        n, num_tokens = batch.rows.shape[0], int(batch.num_new.sum())
        for size in self._ascending:
            missing = size.num_tokens - num_tokens
            if missing >= 0 and n + (missing > 0) <= size.num_rows:
                return size if missing <= self._max_model_len else None
        return None

    def replay(self, batch: HostBatch, size: GraphSize) -> Computed:
        """Run a step of N rows, of which S sample, in the graph of a size that it fits."""
        graph, s = self._graphs[size], batch.sample_idx.shape[0]
        self._recorder.upload_into(padded_mixed(batch, size, self._dummy_row), graph.batch)
        graph.replay()
        num_tokens = int(batch.num_new.sum())
        if graph.tapped is not None and isinstance(self._model, HandsOutLayers):
            self._model.tapped = graph.tapped[:num_tokens]
        return Computed(
            graph.hidden[:num_tokens], graph.sampled[:s], SamplingRows(*(its[:s] for its in graph.sampling))
        )

    def _step(self, batch: Tensor, num_tokens: int) -> tuple[Tensor, Tensor, SamplingRows, Tensor | None]:
        inputs, last = gather_inputs(
            batch[:3],
            self._state,
            self._kv.page_size,
            num_tokens=num_tokens,
            num_pages=None,
            max_query_len=num_tokens,
            max_seq_len=self._max_model_len,
        )
        hidden = self._model.forward(inputs, self._kv)
        sampling = SamplingRows(*(its.index_select(0, batch[3]) for its in last))
        sampled = hidden.index_select(0, sampling.logits_indices)
        return hidden, sampled, sampling, self._model.tapped if isinstance(self._model, HandsOutLayers) else None
