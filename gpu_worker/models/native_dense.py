"""The dense decoder on the native CPU kernels: the same interface, all layers in one call."""

import sys
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.core.checkpoint.families.dense import DenseConfig
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.dense import DenseLayer, DenseModel, DenseWeights
from penstock.gpu_worker.models.linear import Embedding, Linear
from penstock.gpu_worker.models.model import ForwardInputs, WholeStep
from penstock.gpu_worker.models.rope import Rope
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.kernels.native.library import (
    Library,
    NativeLayer,
    NativeShape,
    NativeWeights,
    PackedLinear,
    StepTables,
)

_LONG = 128
"""Tokens in a step from which torch's bf16 products are worth unpacking all weights for, on processors with bf16 matrix
instructions. Estimated from such processors' rates: none was available."""


class NativeDenseModel:
    """See `Model`. Weights in the kernels' layout; activations are fp32, whatever the weights are.

    Activations may be rounded to bf16 as inputs of each product: see `rounds_inputs`.

    A token's hidden state is bitwise the same alone, in any batch, in any chunk of its prompt, and after preemption.
    """

    kernels = "native"
    can_be_captured = False

    def __init__(
        self,
        config: DenseConfig,
        weights: DenseWeights,
        library: Library,
        *,
        rounds_inputs: bool = False,
        long_on_torch: bool = False,
    ) -> None:
        """Packs the weights, layer by layer.

        Args:
            config: of the model.
            weights: fp32 or bf16.
            library: the kernels.
            rounds_inputs: as in `Library.pack`, for all weights.
            long_on_torch: whether torch computes steps of many tokens, which changes their bits. It gets one weight at
                a time, unpacked; weights must be bf16.
        """
        self.config = config
        shape = NativeShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            activation=config.activation,
            eps=config.rms_norm_eps,
        )
        layers, unpacking = [], []
        memory = _Memory()
        for layer, window in zip(weights.layers, config.windows, strict=True):
            packed = _pack_layer(layer, window, library, rounds_inputs)
            layers.append(packed)
            if long_on_torch:
                unpack = partial(_Unpacking, library=library, memory=memory)
                qkv, o, gate_up, down = (unpack(it) for it in (packed.qkv, packed.o, packed.gate_up, packed.down))
                unpacking.append(layer._replace(qkv=qkv, o=o, gate_up=gate_up, down=down))
        head = weights.embedding.head() if weights.lm_head is None else weights.lm_head
        packed_head = head.pack(library, rounds_inputs=rounds_inputs)
        table = None if weights.lm_head is None else weights.embedding.table()
        embedding: Embedding = weights.embedding if table is not None else _PackedEmbedding(packed_head)
        final_norm = weights.final_norm
        self.native = library.model(shape, NativeWeights(table, layers, final_norm.float(), packed_head))
        self._rope = Rope(config.rope, config.head_dim)
        self._torch: DenseModel | None = None
        if long_on_torch:
            unpacked_head = _Unpacking(packed_head, library, memory)
            self._torch = DenseModel(config, DenseWeights(embedding, tuple(unpacking), final_norm, unpacked_head))
            self._torch.rope = self._rope

    def prepare(self, device: Device, num_rows: int, max_model_len: int) -> None:
        self._rope.prepare(device, num_rows, max_model_len)

    def enter_row(self, row: int, num_prompt_tokens: int) -> None:
        if self._rope.table is None:
            self._rope.set_row(row, num_prompt_tokens)

    def forward(self, inputs: ForwardInputs, kv: KVPool) -> Tensor:
        """fp32[T, H]."""
        if self._torch is not None and inputs.input_ids.shape[0] >= _LONG:
            return self._torch.forward(inputs, kv).float()
        return self.native.forward(
            inputs.input_ids,
            self._rope.for_step(inputs.positions, inputs.rows, inputs.query_start_loc).cos_sin,
            inputs.slot_mapping,
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.page_table,
            kv.of_group(kv.groups[0]),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32[S, H] -> fp32[S, V]"""
        return self.native.logits(hidden)

    def whole_step(self, token_ids: Tensor, page_table: Tensor, kv: KVPool) -> WholeStep | None:
        if self._rope.table is None:
            return None
        tables = StepTables(token_ids, page_table, self._rope.table)
        compute = partial(self.native.step, tables=tables, kv=kv.of_group(kv.groups[0]))
        return WholeStep(compute, max_tokens=sys.maxsize if self._torch is None else _LONG - 1)


def _pack_layer(layer: DenseLayer, window: int | None, library: Library, rounds_inputs: bool) -> NativeLayer:
    return NativeLayer(
        input_norm=layer.input_norm.float(),
        qkv=layer.qkv.pack(library, rounds_inputs=rounds_inputs),
        q_norm=_float(layer.q_norm),
        k_norm=_float(layer.k_norm),
        o=layer.o.pack(library, rounds_inputs=rounds_inputs),
        mlp_norm=layer.mlp_norm.float(),
        gate_up=layer.gate_up.pack(library, interleaved=True, rounds_inputs=rounds_inputs),
        down=layer.down.pack(library, rounds_inputs=rounds_inputs),
        window=window,
    )


def _float(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.float()


class _Memory:
    """Memory for one weight, as large as the largest one requested."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0, dtype=torch.bfloat16)

    def of(self, num_outputs: int, num_inputs: int) -> Tensor:
        """bf16[N, K]; overwritten by the next one."""
        if self._numbers.shape[0] < num_outputs * num_inputs:
            self._numbers = torch.empty(num_outputs * num_inputs, dtype=torch.bfloat16)
        return self._numbers[: num_outputs * num_inputs].view(num_outputs, num_inputs)


class _Unpacking(NamedTuple):
    """See `Linear`. A packed weight that is unpacked for each of torch's products, so it is in memory only once."""

    packed: PackedLinear
    library: Library
    memory: _Memory

    def __call__(self, x: Tensor, step: ForwardInputs | None) -> Tensor:
        weight = self.memory.of(self.packed.num_outputs, self.packed.num_inputs)
        self.library.unpack(self.packed, weight)
        bias = self.packed.plain_bias()
        return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))

    def pack(self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False) -> PackedLinear:
        return self.packed


class _PackedEmbedding(NamedTuple):
    """See `Embedding`. Rows of a packed output matrix."""

    packed: PackedLinear

    def __call__(self, step: ForwardInputs) -> Tensor:
        return self.packed.rows(step.input_ids.long())

    def head(self) -> Linear:
        raise NotImplementedError("the output matrix is packed already")

    def table(self) -> Tensor:
        raise NotImplementedError("the output matrix holds its rows")
