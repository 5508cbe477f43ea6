"""An encoder built from its description: its rows have no pages, and all positions of a row are in one step."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.linear import Linear
from penstock.gpu_worker.models.model import NO_EXPERTS, ForwardInputs, WholeStep
from penstock.gpu_worker.models.rope import cos_sin_table
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.kernels.activation import Activation, activation
from penstock.kernels.attention.ragged_attention import RaggedRows, ragged_attention
from penstock.kernels.experts.held_experts import HeldExperts
from penstock.kernels.native.attention.ragged import WIDTH, NativeRows
from penstock.kernels.native.library import Library
from penstock.kernels.norms import NormWeights, add_norm, norm
from penstock.models.description.encoder import ClassHead, Encoder, EncoderAttention
from penstock.models.parsing.rope import RopeConfig

_NO_PAIR = 1 << 30
"""The position of a second text that is not there."""


class EncoderBlock(NamedTuple):
    """See `EncoderLayer`."""

    qkv: Linear
    o: Linear
    attention_norm: NormWeights | None
    gate_up: Linear
    down: Linear
    mlp_norm: NormWeights


class ClassHeadBlock(NamedTuple):
    """See `ClassHead`."""

    head: ClassHead
    dense: Linear | None
    norm: NormWeights | None
    out: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[S, H] -> [S, classes]"""
        if self.dense is not None:
            x = self.dense(x, None)
            x = x.tanh() if self.head.activation is None else activation(x, self.head.activation)
        if self.norm is not None:
            x = norm(x, self.norm)
        return self.out(x, None)


class EncoderWeights(NamedTuple):
    """A whole encoder."""

    embedding: Tensor  # [V, H]
    positions: Tensor | None  # [P, H]
    types: Tensor | None  # [types, H]
    embedding_norm: NormWeights
    layers: tuple[EncoderBlock, ...]
    final_norm: NormWeights | None
    head: ClassHeadBlock | None


class EncoderModel:
    """See `Model`."""

    can_be_captured = False
    held_experts: Mapping[int, HeldExperts] = NO_EXPERTS
    enters_rows = False

    def __init__(self, config: Encoder, weights: EncoderWeights, kernels: str, library: Library | None = None) -> None:
        """`kernels`: what computes it, as one word; `library`: the native CPU kernels, if these do."""
        self.config = config
        self.head = weights.head
        self.kernels = kernels
        self._library = library
        widths = (layer.mlp.size for layer in config.layers)
        self.is_batch_invariant = library is not None and not any(width % WIDTH for width in widths)
        self._weights = weights
        ropes = {layer.attention.rope for layer in config.layers}
        self._tables: dict[RopeConfig, Tensor] = {rope: torch.empty(0) for rope in ropes if rope is not None}
        self._second_from = torch.empty(0)

    def prepare(self, device: Device, num_rows: int, max_model_len: int) -> None:
        on = device.torch_device
        self._tables = {rope: cos_sin_table(rope, max_model_len + 1).to(on) for rope in self._tables}
        self._second_from = torch.full((num_rows,), _NO_PAIR, dtype=torch.int32, device=on)

    def enter_row(self, row: int, num_prompt_tokens: int) -> None:
        """Nothing depends on a row's length."""

    def set_pair(self, rows: Tensor, second_from: Tensor) -> None:
        """These rows hold texts whose second one begins at these positions: int64[n], int32[n]; 0: there is none."""
        self._second_from[rows] = torch.where(second_from > 0, second_from, _NO_PAIR)

    def forward(self, inputs: ForwardInputs, kv: KVPool) -> Tensor:
        order = self._in_order_of_length(inputs)
        if order is None:
            return self._encoded(inputs, inputs.positions, inputs.input_ids, self._types_of(inputs), _rows_of(inputs))
        tokens, rows = order
        types = self._types_of(inputs)
        sorted_types = None if types is None else types[tokens]
        hidden = self._encoded(inputs, inputs.positions[tokens], inputs.input_ids[tokens], sorted_types, rows)
        return torch.empty_like(hidden).index_copy_(0, tokens, hidden)

    def classify(self, pooled: Tensor) -> Tensor:
        """See `Classifies`."""
        assert self.head is not None
        return self.head(pooled.to(self._weights.embedding.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Zeros: no row of this model draws tokens."""
        return hidden.new_zeros(hidden.shape[0], self.config.vocab_size)

    def whole_step(self, token_ids: Tensor, page_tables: Sequence[Tensor], kv: KVPool) -> WholeStep | None:
        return None

    def _in_order_of_length(self, inputs: ForwardInputs) -> tuple[Tensor, RaggedRows] | None:
        """For torch, int64[T]: the tokens in an order in which rows of equal length are neighbours; and these rows."""
        if inputs.input_ids.is_cuda or self._library is not None:
            return None
        rows = _rows_of(inputs)
        order = np.argsort(rows.lens, kind="stable")
        lens = rows.lens[order]
        starts = (np.cumsum(rows.lens) - rows.lens)[order]
        ends = np.cumsum(lens)
        tokens = np.arange(ends[-1]) + np.repeat(starts - (ends - lens), lens)
        begins = torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32))
        return torch.from_numpy(tokens), RaggedRows(lens, begins)

    def _types_of(self, inputs: ForwardInputs) -> Tensor | None:
        """int64[T], the type of each token; None if the model has one type at most."""
        if self.config.num_types < 2:
            return None
        second_from = self._second_from.index_select(0, inputs.rows)
        num_new = inputs.query_start_loc.diff().long()
        by_token = second_from.repeat_interleave(num_new, output_size=inputs.positions.shape[0])
        return (inputs.positions >= by_token).long()

    def _encoded(
        self, inputs: ForwardInputs, positions: Tensor, input_ids: Tensor, types: Tensor | None, rows: RaggedRows
    ) -> Tensor:
        """[T, H] of tokens in the order of these rows."""
        config, weights = self.config, self._weights
        x = functional.embedding(input_ids, weights.embedding)
        if weights.types is not None:
            x = x + (weights.types[0] if types is None else functional.embedding(types, weights.types))
        if weights.positions is not None and config.positions is not None:
            x = x + functional.embedding(positions + config.positions.offset, weights.positions)
        x = norm(x, weights.embedding_norm)
        attend = partial(ragged_attention, rows=rows)
        if self._library is not None:
            attend = partial(NativeRows(rows).attend, self._library)
        angles = {rope: table.index_select(0, positions) for rope, table in self._tables.items()}
        for layer, block in zip(config.layers, weights.layers, strict=True):
            kind = Activation(layer.mlp.activation, layer.mlp.is_gated)
            if config.norms_are_before:
                normed = x if block.attention_norm is None else norm(x, block.attention_norm)
                x = x + self._attended(normed, inputs, attend, layer.attention, block, angles)
                inner = block.gate_up(norm(x, block.mlp_norm), inputs)
                x = x + block.down.of_activation(inner, kind, inputs)
            else:
                x, _ = add_norm(
                    self._attended(x, inputs, attend, layer.attention, block, angles), x, block.attention_norm
                )
                x, _ = add_norm(block.down.of_activation(block.gate_up(x, inputs), kind, inputs), x, block.mlp_norm)
        return x if weights.final_norm is None else norm(x, weights.final_norm)

    @staticmethod
    def _attended(
        x: Tensor,
        inputs: ForwardInputs,
        attend: Callable[..., Tensor],
        attention: EncoderAttention,
        block: EncoderBlock,
        angles: Mapping[RopeConfig, Tensor],
    ) -> Tensor:
        """[T, H] -> [T, H], the output of a layer's attention."""
        qkv = block.qkv(x, inputs).view(-1, 3, attention.num_heads, attention.head_dim)
        if attention.rope is not None:
            _rotate(qkv[:, :2], angles[attention.rope])
        seen = attend(qkv.contiguous(), scale=attention.scale, reach=attention.reach)
        return block.o(seen.flatten(1), inputs)


def _rows_of(inputs: ForwardInputs) -> RaggedRows:
    assert inputs.host_lens is not None, "steps of encoders are not captured"
    return RaggedRows(inputs.host_lens[0], inputs.query_start_loc)


def _rotate(qk: Tensor, angles: Tensor) -> None:
    """Rotate [T, 2, H, D] in place by fp32[T, D], cosines and sines; the numbers of a pair are in different halves."""
    cos, sin = (half[:, None, None] for half in angles.chunk(2, dim=-1))
    first, second = qk.float().chunk(2, dim=-1)
    qk.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
