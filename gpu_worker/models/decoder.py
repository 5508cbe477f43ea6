"""A decoder built from its description: blocks over the kernels, on a GPU or with torch's kernels on a CPU."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.attention import AttentionBackend, begin_attention
from penstock.gpu_worker.models.blocks.attention import AttentionBlock
from penstock.gpu_worker.models.blocks.entry import EntryBlock
from penstock.gpu_worker.models.blocks.experts import BesideBlock, ExpertsBlock
from penstock.gpu_worker.models.blocks.latent_attention import LatentAttentionBlock
from penstock.gpu_worker.models.blocks.layer_inputs import LayerInputBlock, LayerInputsBlock
from penstock.gpu_worker.models.blocks.mlp import MLPBlock
from penstock.gpu_worker.models.blocks.recurrent import RecurrentBlock, SideBySideBlock
from penstock.gpu_worker.models.blocks.step import Step
from penstock.gpu_worker.models.blocks.travelling_experts import TravellingExperts
from penstock.gpu_worker.models.latent_attention import LatentPages
from penstock.gpu_worker.models.linear import Embedding, Linear
from penstock.gpu_worker.models.model import NO_EXPERTS, ForwardInputs, LayerCounter, WholeStep
from penstock.gpu_worker.models.rope import Rope
from penstock.gpu_worker.parallel.alone import ALONE
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.kernels.attention.qk_norm_rope_write import query_growth
from penstock.kernels.experts.held_experts import HeldExperts
from penstock.kernels.norms import NormWeights, add_norm, norm
from penstock.kernels.scan.rows import StateRows
from penstock.models.description.decoder import Attention, Decoder

if TYPE_CHECKING:
    from penstock.gpu_worker.models.vision.tower import Tower


class DecoderLayer(NamedTuple):
    """See `Layer`, the description."""

    mixer_norm: NormWeights | None
    mixer: AttentionBlock | LatentAttentionBlock | RecurrentBlock | SideBySideBlock | None
    post_mixer_norm: NormWeights | None
    mlp_norm: NormWeights | None
    mlp: MLPBlock | ExpertsBlock | TravellingExperts | None
    post_mlp_norm: NormWeights | None
    is_parallel: bool = False
    residual_scale: float = 1.0
    beside_mlp: BesideBlock | None = None
    input: LayerInputBlock | None = None
    output_scale: float | None = None

    @property
    def first_norm(self) -> NormWeights | None:
        """The norm of its input."""
        return self.mlp_norm if self.mixer is None else self.mixer_norm


class DecoderWeights(NamedTuple):
    """A whole model."""

    embedding: Embedding | None  # [V, H]
    positions: Tensor | None  # [P, H]
    layers: Iterable[DecoderLayer]  # may be iterated only once, and may read files then
    final_norm: NormWeights | None
    head: Linear | None  # [V, H]; None: the embedding is the output matrix, if there are logits
    layer_inputs: LayerInputsBlock | None = None
    entry: EntryBlock | None = None
    held_experts: Mapping[int, HeldExperts] = NO_EXPERTS  # complete once all layers are read


class DecoderModel:
    """See `Model`."""

    is_batch_invariant = False
    can_be_captured = True

    def __init__(
        self,
        config: Decoder,
        weights: DecoderWeights,
        attention: AttentionBackend = begin_attention,
        ranks: Ranks = ALONE,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`ranks` hold the other parts if `config` describes a rank's part. `dtype`: that of activations."""
        self.config = config
        self._dtype = dtype
        self._sum = ranks.all_reduce if ranks.place.num_tensor > 1 else _as_it_is
        self.embedding, self._positions, layers, self.final_norm, head, self._layer_inputs = weights[:6]
        self._entry, self.held_experts = weights.entry, weights.held_experts
        self.layers = tuple(layers)
        ropes = (its.rope for _, its in config.attentions)
        self.ropes = {rope: Rope(rope) for rope in dict.fromkeys(ropes) if rope is not None}
        growths = (its.query_growth for _, its in config.attentions if isinstance(its, Attention))
        self._growths = {growth for growth in growths if growth is not None}
        self._attention = attention
        self._kv_index = config.kv_index
        self._layer_counter: LayerCounter | None = None
        self._begins = config.shard is None or config.shard.place.is_first_stage
        self.head = self.embedding.head() if head is None and config.has_head and self.embedding is not None else head
        self.kernels = "torch"
        self.tower: Tower | None = None
        self.tapped: Tensor | None = None
        self._taps: tuple[int, ...] = ()

    def tap(self, layers: Sequence[int]) -> None:
        """See `HandsOutLayers`."""
        self._taps = tuple(layers)

    def prepare(self, device: Device, num_rows: int, max_model_len: int) -> None:
        self.kernels = "triton" if device.torch_device.type == "cuda" else "torch"
        for rope in self.ropes.values():
            rope.prepare(device, num_rows, max_model_len)

    def count_layers(self, counter: LayerCounter) -> None:
        """See `CountsLayers`."""
        self._layer_counter = counter

    @property
    def enters_rows(self) -> bool:
        return any(rope.table is None for rope in self.ropes.values())

    def enter_row(self, row: int, num_prompt_tokens: int) -> None:
        for rope in self.ropes.values():
            if rope.table is None:
                rope.set_row(row, num_prompt_tokens)

    def forward(self, inputs: ForwardInputs, kv: KVPool) -> Tensor:
        turns = None if inputs.images is None else inputs.images.turns
        groups = [(i, group) for i, group in enumerate(kv.groups) if group.layers]
        step = Step(
            inputs,
            {layer: kv.layers[index] for layer, index in self._kv_index.items()},
            {i: self._attention(inputs.of_group(i), group) for i, group in groups if group.has_values},
            {i: LatentPages(inputs.of_group(i), group) for i, group in groups if not group.has_values},
            {
                config: rope.for_step(inputs.positions, inputs.rows, inputs.query_start_loc, turns)
                for config, rope in self.ropes.items()
            },
            {its: query_growth(inputs.positions, its.beta, its.length, its.shift) for its in self._growths},
        )
        if kv.states is not None:
            rows = StateRows(inputs.rows, inputs.query_start_loc, inputs.max_query_len)
            step = step._replace(states=kv.states.layers, state_rows=rows)
        embedded = None if self.embedding is None else self._embed(inputs, self.embedding)
        its_inputs = None
        if self._layer_inputs is not None and embedded is not None:
            its_inputs = self._layer_inputs(embedded, inputs)
        residual = self._given(inputs) if embedded is None or not self._begins else embedded
        pair = None
        if self._entry is not None and embedded is not None:
            residual, pair = self._entry(embedded, self._given(inputs), inputs)
        first = self.layers[0].first_norm
        x = pair if pair is not None else residual if first is None else norm(residual, first)
        tapped: dict[int, Tensor] = {}
        deep = None if inputs.images is None else inputs.images.deep(self.config.hidden_size)
        next_norms = (*(layer.first_norm for layer in self.layers[1:]), self.final_norm)
        for i, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            if deep is not None and 0 < i <= deep[1].shape[1]:
                residual.index_add_(0, deep[0], deep[1][:, i - 1].to(residual.dtype))
                x = residual if layer.first_norm is None else norm(residual, layer.first_norm)
            if i in self._taps:
                tapped[i] = residual.clone()
            scale, mixed = layer.residual_scale, None if layer.mixer is None else layer.mixer(x, step, i)
            if self._layer_counter is not None:
                self._layer_counter[0] = i + 1
            if layer.mlp is None:
                if mixed is not None:
                    x, residual = add_norm(self._sum(mixed), residual, next_norm, scale, layer.post_mixer_norm)
                continue
            if layer.is_parallel and mixed is not None:
                mixed += layer.mlp(x if layer.mlp_norm is None else norm(residual, layer.mlp_norm), inputs)
                x, residual = add_norm(self._sum(mixed), residual, next_norm, scale)
                continue
            if mixed is not None:
                x, residual = add_norm(self._sum(mixed), residual, layer.mlp_norm, scale, layer.post_mixer_norm)
            made = layer.mlp(x, inputs)
            if not isinstance(layer.mlp, TravellingExperts):
                made = self._sum(made)
            if layer.beside_mlp is not None:
                made = layer.beside_mlp(residual, made, inputs)
            if layer.input is None and layer.output_scale is None:
                x, residual = add_norm(made, residual, next_norm, scale, layer.post_mlp_norm)
                continue
            _, residual = add_norm(made, residual, None, scale, layer.post_mlp_norm)
            if layer.input is not None and its_inputs is not None:
                added = layer.input(residual, its_inputs[:, i], inputs)
                _, residual = add_norm(added, residual, None, 1.0, layer.input.norm)
            residual *= 1.0 if layer.output_scale is None else layer.output_scale
            x = residual if next_norm is None else norm(residual, next_norm)
        if self._taps:
            tapped[len(self.layers)] = residual
            self.tapped = torch.cat([tapped[layer] for layer in self._taps], dim=1)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> [S, V] in the model's dtype."""
        assert self.head is not None
        logits = self.head(hidden, None)
        if self.config.logit_scale != 1.0:
            logits *= self.config.logit_scale
        if cap := self.config.logit_softcap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def whole_step(self, token_ids: Tensor, page_tables: Sequence[Tensor], kv: KVPool) -> WholeStep | None:
        return None

    def _given(self, inputs: ForwardInputs) -> Tensor:
        """[T, H], the residual stream from the stage before."""
        if inputs.given is not None:
            return inputs.given.to(self._dtype)
        # No stage before it sends anything while memory is measured and kernels are compiled.
        shape = (inputs.input_ids.shape[0], self.config.hidden_size)
        return torch.zeros(shape, dtype=self._dtype, device=inputs.input_ids.device)

    def _embed(self, inputs: ForwardInputs, embedding: Embedding) -> Tensor:
        """[T, H], the initial residual stream."""
        embedded = embedding(inputs)
        if (scale := self.config.embedding_scale) != 1.0:
            is_rounded = self.config.embedding_scale_is_rounded
            embedded *= torch.tensor(scale, dtype=embedded.dtype).item() if is_rounded else scale
        if (images := inputs.images) is not None and images.places is not None and images.embeddings is not None:
            embedded.index_copy_(0, images.places, images.embeddings[:, : embedded.shape[1]].to(embedded.dtype))
        if self._positions is not None and self.config.positions is not None:
            embedded += functional.embedding(inputs.positions + self.config.positions.offset, self._positions)
        return embedded


def _as_it_is(x: Tensor) -> Tensor:
    return x
