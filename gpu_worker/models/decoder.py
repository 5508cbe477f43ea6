"""The decoder, as its description says: blocks over the kernels, on a GPU or with torch's kernels on a CPU."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.core.checkpoint.decoder import Attention, Decoder
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.attention import AttentionBackend, begin_attention
from penstock.gpu_worker.models.blocks.attention import AttentionBlock
from penstock.gpu_worker.models.blocks.experts import ExpertsBlock
from penstock.gpu_worker.models.blocks.latent_attention import LatentAttentionBlock
from penstock.gpu_worker.models.blocks.mlp import MLPBlock
from penstock.gpu_worker.models.blocks.step import Step
from penstock.gpu_worker.models.latent_attention import LatentPages
from penstock.gpu_worker.models.linear import Embedding, Linear
from penstock.gpu_worker.models.model import ForwardInputs, WholeStep
from penstock.gpu_worker.models.rope import Rope
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.kernels.norms import NormWeights, add_norm, norm
from penstock.kernels.qk_norm_rope_write import query_growth


class DecoderLayer(NamedTuple):
    """See `Layer`, the description."""

    mixer_norm: NormWeights | None
    mixer: AttentionBlock | LatentAttentionBlock
    post_mixer_norm: NormWeights | None
    mlp_norm: NormWeights | None
    mlp: MLPBlock | ExpertsBlock
    post_mlp_norm: NormWeights | None
    is_parallel: bool = False
    residual_scale: float = 1.0


class DecoderWeights(NamedTuple):
    """A whole model."""

    embedding: Embedding  # [V, H]
    positions: Tensor | None  # [P, H]
    layers: Iterable[DecoderLayer]  # they may be read from files when they are iterated, once
    final_norm: NormWeights | None
    head: Linear | None  # [V, H]; None: the embedding's


class DecoderModel:
    """See `Model`."""

    can_be_captured = True

    def __init__(self, config: Decoder, weights: DecoderWeights, attention: AttentionBackend = begin_attention) -> None:
        self.config = config
        self.embedding, self._positions, layers, self.final_norm, head = weights
        self.layers = tuple(layers)
        ropes = (layer.mixer.rope for layer in config.layers)
        self.ropes = {rope: Rope(rope) for rope in dict.fromkeys(ropes) if rope is not None}
        mixers = (layer.mixer for layer in config.layers)
        growths = (mixer.query_growth for mixer in mixers if isinstance(mixer, Attention))
        self._growths = {growth for growth in growths if growth is not None}
        self._attention = attention
        self.head = self.embedding.head() if head is None else head
        self.kernels = "torch"

    def prepare(self, device: Device, num_rows: int, max_model_len: int) -> None:
        self.kernels = "triton" if device.torch_device.type == "cuda" else "torch"
        for rope in self.ropes.values():
            rope.prepare(device, num_rows, max_model_len)

    def enter_row(self, row: int, num_prompt_tokens: int) -> None:
        for rope in self.ropes.values():
            if rope.table is None:
                rope.set_row(row, num_prompt_tokens)

    def forward(self, inputs: ForwardInputs, kv: KVPool) -> Tensor:
        step = Step(
            inputs,
            kv.layers,
            {i: self._attention(inputs.of_group(i), group) for i, group in enumerate(kv.groups) if group.has_values},
            {i: LatentPages(inputs.of_group(i), group) for i, group in enumerate(kv.groups) if not group.has_values},
            {
                config: rope.for_step(inputs.positions, inputs.rows, inputs.query_start_loc)
                for config, rope in self.ropes.items()
            },
            {its: query_growth(inputs.positions, its.beta, its.length, its.shift) for its in self._growths},
        )
        residual = self._embed(inputs)
        first = self.layers[0].mixer_norm
        x = residual if first is None else norm(residual, first)
        next_norms = (*(layer.mixer_norm for layer in self.layers[1:]), self.final_norm)
        for i, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            scale, mixed = layer.residual_scale, layer.mixer(x, step, i)
            if layer.is_parallel:
                mixed += layer.mlp(x if layer.mlp_norm is None else norm(residual, layer.mlp_norm), inputs)
                x, residual = add_norm(mixed, residual, next_norm, scale)
                continue
            x, residual = add_norm(mixed, residual, layer.mlp_norm, scale, layer.post_mixer_norm)
            x, residual = add_norm(layer.mlp(x, inputs), residual, next_norm, scale, layer.post_mlp_norm)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> [S, V] in the model's dtype."""
        logits = self.head(hidden, None)
        if self.config.logit_scale != 1.0:
            logits *= self.config.logit_scale
        if cap := self.config.logit_softcap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def whole_step(self, token_ids: Tensor, page_tables: Sequence[Tensor], kv: KVPool) -> WholeStep | None:
        return None

    def _embed(self, inputs: ForwardInputs) -> Tensor:
        """[T, H], the residual stream's beginning."""
        embedded = self.embedding(inputs)
        if (scale := self.config.embedding_scale) != 1.0:
            is_rounded = self.config.embedding_scale_is_rounded
            embedded *= torch.tensor(scale, dtype=embedded.dtype).item() if is_rounded else scale
        if self._positions is not None and self.config.positions is not None:
            embedded += functional.embedding(inputs.positions + self.config.positions.offset, self._positions)
        return embedded
