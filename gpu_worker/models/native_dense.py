"""The dense decoder on the native CPU kernels: the same interface, all layers in one call."""

import sys
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional

from penstock.core.checkpoint.decoder import Attention, Decoder, DenseMLP, Layer, Norm
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.blocks.mlp import MLPBlock
from penstock.gpu_worker.models.decoder import DecoderLayer, DecoderModel, DecoderWeights
from penstock.gpu_worker.models.linear import Embedding, Linear
from penstock.gpu_worker.models.model import ForwardInputs, WholeStep
from penstock.gpu_worker.models.rope import Rope
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.kernels import norms
from penstock.kernels.native.library import Library, PackedLinear
from penstock.kernels.native.program import (
    ACTIVATIONS,
    GroupPages,
    HeadNorms,
    HeadShape,
    NativePool,
    NormWeights,
    ProgramBuilder,
    QueryGrowth,
    RotaryTable,
)

_LONG = 128
"""Tokens in a step from which torch's bf16 products are worth unpacking all weights for, on processors with bf16 matrix
instructions. Estimated from such processors' rates: none was available."""


def can_compute(decoder: Decoder) -> bool:
    """Whether the native kernels have all that this model needs."""
    first = decoder.layers[0]
    mixer, mlp, norm = first.mixer, first.mlp, first.mixer_norm
    if not (isinstance(mixer, Attention) and isinstance(mlp, DenseMLP) and isinstance(norm, Norm)):
        return False
    plain = Attention(
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        scale=mixer.head_dim**-0.5,
        qkv_bias=mixer.qkv_bias,
        o_bias=mixer.o_bias,
        q_norm=mixer.q_norm and norm,
        k_norm=mixer.k_norm and norm,
        rope=mixer.rope,
    )
    layers = {Layer(mixer=replace(plain, window=w), mlp=mlp, mixer_norm=norm, mlp_norm=norm) for w in decoder.windows}
    is_plain = (decoder.embedding_scale, decoder.logit_scale, decoder.logit_softcap) == (1.0, 1.0, 0.0)
    return (
        is_plain
        and layers.issuperset(decoder.layers)
        and mixer.rope is not None
        and norm == decoder.final_norm == Norm(eps=norm.eps)
        and (mlp.is_gated and mlp.activation in ACTIVATIONS)
        and decoder.positions is None
        and not decoder.head_bias
    )


class NativeDenseModel:
    """See `Model`. Weights in the kernels' layout; activations are fp32, whatever the weights are.

    Activations may be rounded to bf16 as inputs of each product: see `rounds_inputs`.

    A token's hidden state is bitwise the same alone, in any batch, in any chunk of its prompt, and after preemption.
    """

    kernels = "native"
    can_be_captured = False

    def __init__(
        self,
        config: Decoder,
        weights: DecoderWeights,
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
        self.config = replace(config, has_page_groups=False)
        hidden, mixer, mlp = config.hidden_size, config.layers[0].mixer, config.layers[0].mlp
        assert isinstance(mixer, Attention)
        assert isinstance(mlp, DenseMLP)
        assert mixer.rope is not None
        heads = HeadShape(mixer.num_heads, mixer.num_kv_heads, mixer.head_dim)
        builder = ProgramBuilder(hidden)
        residual, x, gated = builder.slot(hidden), builder.slot(hidden), builder.slot(mlp.size)
        qkv = builder.slot((mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim)
        attended = builder.slot(mixer.num_heads * mixer.head_dim)
        memory = _Memory()
        head = (weights.embedding.head() if weights.head is None else weights.head).pack(
            library, rounds_inputs=rounds_inputs
        )
        table = None if weights.head is None else weights.embedding.table()
        builder.embed(head if table is None else table, residual)
        unpacking = []

        def rms(norm: norms.NormWeights | None) -> NormWeights:
            return NormWeights() if norm is None else NormWeights("rms", norm.weight, eps=norm.eps)

        for i, (layer, window) in enumerate(zip(weights.layers, config.windows, strict=True)):
            packed = _pack_layer(layer, library, rounds_inputs)
            builder.norm(rms(layer.mixer_norm), residual, x, hidden)
            builder.product(packed.qkv, x, qkv)
            head_norms = HeadNorms(rms(layer.mixer.norms.q), rms(layer.mixer.norms.k))
            builder.heads(qkv, heads, i, head_norms, 0, QueryGrowth())
            builder.attend(qkv, attended, heads, i, scale=mixer.scale, window=window)
            builder.product(packed.o, attended, residual, "add")
            builder.norm(rms(layer.mlp_norm), residual, x, hidden)
            builder.product(packed.gate_up, x, gated, "gate", activation=mlp.activation)
            builder.product(packed.down, gated, residual, "add")
            if long_on_torch:
                qkv_, o, gate_up, down = (_Unpacking(it, library, memory) for it in packed)
                mixer_block = layer.mixer._replace(qkv=qkv_, o=o)
                assert isinstance(layer.mlp, MLPBlock)
                mlp_block = layer.mlp._replace(gate_up=gate_up, down=down)
                unpacking.append(layer._replace(mixer=mixer_block, mlp=mlp_block))
        builder.norm(rms(weights.final_norm), residual, ProgramBuilder.OUT, hidden)
        self._program = builder.build(library, head)
        self._pool: tuple[KVPool, NativePool] | None = None
        self._rope = Rope(mixer.rope)
        self._torch: DecoderModel | None = None
        if long_on_torch:
            embedding: Embedding = weights.embedding if table is not None else _PackedEmbedding(head)
            unpacked_head = _Unpacking(head, library, memory)
            unpacked = DecoderWeights(embedding, None, tuple(unpacking), weights.final_norm, unpacked_head)
            self._torch = DecoderModel(self.config, unpacked)
            self._torch.ropes = {mixer.rope: self._rope}

    def prepare(self, device: Device, num_rows: int, max_model_len: int) -> None:
        self._rope.prepare(device, num_rows, max_model_len)

    def enter_row(self, row: int, num_prompt_tokens: int) -> None:
        if self._rope.table is None:
            self._rope.set_row(row, num_prompt_tokens)

    def forward(self, inputs: ForwardInputs, kv: KVPool) -> Tensor:
        """fp32[T, H]."""
        if self._torch is not None and inputs.input_ids.shape[0] >= _LONG:
            return self._torch.forward(inputs, kv).float()
        rotation = self._rope.for_step(inputs.positions, inputs.rows, inputs.query_start_loc)
        return self._program.forward(
            *(inputs.input_ids, inputs.positions, inputs.query_start_loc, inputs.seq_lens),
            [GroupPages(each.slot_mapping, each.page_table) for each in map(inputs.of_group, range(len(kv.groups)))],
            [RotaryTable(rotation.cos_sin, is_by_position=False)],
            self._pool_of(kv),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32[S, H] -> fp32[S, V]"""
        return self._program.logits(hidden)

    def whole_step(self, token_ids: Tensor, page_table: Tensor, kv: KVPool) -> WholeStep | None:
        if self._rope.table is None:
            return None
        step = self._program.step(token_ids, [page_table], [self._rope.table], self._pool_of(kv))
        return WholeStep(step.compute, max_tokens=sys.maxsize if self._torch is None else _LONG - 1)

    def _pool_of(self, kv: KVPool) -> NativePool:
        if self._pool is None or self._pool[0] is not kv:
            self._pool = kv, NativePool(kv.layers)
        return self._pool[1]


class _PackedLayer(NamedTuple):
    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear


def _pack_layer(layer: DecoderLayer, library: Library, rounds_inputs: bool) -> _PackedLayer:
    assert isinstance(layer.mlp, MLPBlock)
    return _PackedLayer(
        qkv=layer.mixer.qkv.pack(library, rounds_inputs=rounds_inputs),
        o=layer.mixer.o.pack(library, rounds_inputs=rounds_inputs),
        gate_up=layer.mlp.gate_up.pack(library, interleaved=True, rounds_inputs=rounds_inputs),
        down=layer.mlp.down.pack(library, rounds_inputs=rounds_inputs),
    )


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
