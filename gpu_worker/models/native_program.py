"""From a decoder's description and weights to its program for the native CPU kernels."""

from functools import cached_property

import torch
from torch import Tensor

from penstock.core.checkpoint.decoder import Attention, Decoder, DenseMLP, Experts, LatentAttention, Layer
from penstock.gpu_worker.models.blocks.attention import AttentionBlock
from penstock.gpu_worker.models.blocks.experts import ExpertsBlock, routing_of
from penstock.gpu_worker.models.blocks.latent_attention import LatentAttentionBlock
from penstock.gpu_worker.models.blocks.mlp import MLPBlock
from penstock.gpu_worker.models.decoder import DecoderLayer, DecoderWeights
from penstock.gpu_worker.models.linear import Linear
from penstock.gpu_worker.models.unpacking import PackedEmbedding, UnpackingLinear, WeightMemory
from penstock.kernels.native.experts import PackedExperts
from penstock.kernels.native.latent import PackedLatents
from penstock.kernels.native.library import Library, PackedLinear
from penstock.kernels.native.program import (
    ACTIVATIONS,
    HeadShape,
    Program,
    ProgramBuilder,
    QueryGrowth,
)
from penstock.kernels.norms import NormWeights


def lacking(decoder: Decoder) -> str | None:
    """The part of a model for which there is no native operation; None if there are all."""
    for layer in decoder.layers:
        shared = layer.mlp.shared if isinstance(layer.mlp, Experts) and layer.mlp.shared_is_gated else None
        if shared is not None and shared.has_bias:
            return "a gated shared expert with biases"
    return None


class ProgramWriter:
    """Packs a decoder's weights, layer by layer, and writes the operations that use them."""

    def __init__(self, config: Decoder, library: Library, *, rounds_inputs: bool) -> None:
        """`rounds_inputs` is as in `Library.pack`, for all weights."""
        self._config = config
        self._library = library
        self._rounds_inputs = rounds_inputs
        self._memory = WeightMemory()
        self._builder = ProgramBuilder(config.hidden_size)
        ropes = (layer.mixer.rope for layer in config.layers)
        self.ropes = tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    def write(self, weights: DecoderWeights) -> tuple[Program, DecoderWeights]:
        """The program, and the same weights for torch: it shares them, and unpacks one at a time."""
        config, builder = self._config, self._builder
        head = self._pack(weights.embedding.head() if weights.head is None else weights.head)
        embedding = PackedEmbedding(head) if weights.head is None else weights.embedding
        builder.embed(head if weights.head is None else embedding.table(), self._residual, config.embedding_scale)
        if weights.positions is not None and config.positions is not None:
            builder.add_positions(weights.positions, self._residual, config.positions.offset)
        layers = tuple(
            self._layer(number, layer, its)
            for number, (layer, its) in enumerate(zip(config.layers, weights.layers, strict=True))
        )
        builder.norm(weights.final_norm, self._residual, ProgramBuilder.OUT, config.hidden_size)
        program = builder.build(self._library, head, logit_scale=config.logit_scale, logit_softcap=config.logit_softcap)
        return program, weights._replace(embedding=embedding, layers=layers, head=self._kept(head))

    def _layer(self, number: int, layer: Layer, weights: DecoderLayer) -> DecoderLayer:
        scale = layer.residual_scale
        x = self._normed(weights.mixer_norm, self._x)
        # In parallel, both norms come before anything is added to the residual stream.
        mlp_x = x if weights.mlp_norm is None or not layer.is_parallel else self._normed(weights.mlp_norm, self._mlp_x)
        mixer = weights.mixer
        if isinstance(mixer, AttentionBlock):
            mixer = self._attention(number, mixer, x, scale, weights.post_mixer_norm)
        else:
            self._latent_attention(number, mixer, x, scale, weights.post_mixer_norm)
        if not layer.is_parallel:
            mlp_x = self._normed(weights.mlp_norm, self._x)
        if isinstance(weights.mlp, ExpertsBlock):
            self._experts(weights.mlp, mlp_x, scale, weights.post_mlp_norm)
            return weights._replace(mixer=mixer)
        mlp = self._mlp(weights.mlp, mlp_x, scale, weights.post_mlp_norm)
        return weights._replace(mixer=mixer, mlp=mlp)

    def _attention(
        self, number: int, block: AttentionBlock, x: int, scale: float, post: NormWeights | None
    ) -> AttentionBlock:
        its, builder = block.attention, self._builder
        shape = HeadShape(its.num_heads, its.num_kv_heads, its.head_dim)
        growth = its.query_growth
        grown = QueryGrowth() if growth is None else QueryGrowth(growth.beta, growth.length, growth.shift)
        qkv, o = self._pack(block.qkv), self._pack(block.o)
        builder.product(qkv, x, self._qkv)
        builder.heads(
            self._qkv, shape, number, block.norms, None if its.rope is None else self.ropes.index(its.rope), grown
        )
        builder.attend(
            *(self._qkv, self._attended, shape, number),
            scale=its.scale,
            window=its.window,
            softcap=its.softcap,
            sinks=block.sinks,
        )
        self._add(o, self._attended, scale, post)
        return block._replace(qkv=self._kept(qkv), o=self._kept(o))

    def _latent_attention(
        self, number: int, block: LatentAttentionBlock, x: int, scale: float, post: NormWeights | None
    ) -> None:
        its, builder = block.attention, self._builder
        of_queries = x
        if block.q_a is not None and its.q_rank is not None:
            builder.product(self._pack(block.q_a), x, self._q_latent)
            builder.norm(block.q_a_norm, self._q_latent, self._q_latent, its.q_rank)
            of_queries = self._q_latent
        builder.product(self._pack(block.q), of_queries, self._qkv)
        builder.product(self._pack(block.kv_a), x, self._latent)
        norm = block.kv_a_norm
        assert norm.kind == "rms"
        assert norm.weight is not None
        packed = PackedLatents(
            self._library,
            block.kv_b.flatten(0, 1),
            norm.weight.float(),
            norm.eps,
            num_heads=its.num_heads,
            nope_dim=its.nope_dim,
            rope_dim=its.rope_dim,
            scale=its.scale,
            rounds_inputs=self._rounds_inputs,
        )
        rotary = self.ropes.index(its.rope)
        builder.attend_to_latents(packed, self._latent, self._qkv, self._attended, number, rotary)
        self._add(self._pack(block.o), self._attended, scale, post)

    def _mlp(self, block: MLPBlock, x: int, scale: float, post: NormWeights | None) -> MLPBlock:
        gate_up, down = self._pack(block.gate_up, interleaved=block.mlp.is_gated), self._pack(block.down)
        self._activated(block.mlp, gate_up, x)
        self._add(down, self._inner, scale, post)
        return block._replace(gate_up=self._kept(gate_up), down=self._kept(down))

    def _activated(self, mlp: DenseMLP, gate_up: PackedLinear, x: int) -> None:
        """inner = act(gate) * up, or act(up)"""
        self._builder.product(
            gate_up, x, self._inner, "gate" if mlp.is_gated else "activate", activation=mlp.activation
        )

    def _experts(self, block: ExpertsBlock, x: int, scale: float, post: NormWeights | None) -> None:
        """to = experts(x) + shared(x) in a slot for `post`, or added to the residual stream."""
        its, builder, rounds = block.experts, self._builder, self._rounds_inputs
        experts = PackedExperts(
            block.router.pack(self._library),
            block.gate_up.pack(self._library, interleaved=True, rounds_inputs=rounds),
            block.down.pack(self._library, rounds_inputs=rounds),
            routing_of(its.router),
            block.correction,
            ACTIVATIONS.index(its.activation),
            multiplies_input=its.router.multiplies_input,
        )
        to, by = (self._residual, scale) if post is None else (self._added, 1.0)
        builder.mix(experts, x, to, added=scale if post is None else None)
        if (shared := block.shared) is not None:
            self._activated(shared.mlp, self._pack(shared.gate_up, interleaved=shared.mlp.is_gated), x)
            if block.shared_gate is not None:  # it scales what is linear after it
                builder.gate(self._vector(block.shared_gate), x, self._inner, shared.mlp.size)
            builder.product(self._pack(shared.down), self._inner, to, "add", scale=by)
        if post is not None:
            builder.norm(post, to, self._residual, self._config.hidden_size, added=scale)

    def _normed(self, norm: NormWeights | None, to: int) -> int:
        """The slot with the residual stream, normed."""
        if norm is None:
            return self._residual
        self._builder.norm(norm, self._residual, to, self._config.hidden_size)
        return to

    def _add(self, linear: PackedLinear, x: int, scale: float, post: NormWeights | None) -> None:
        """residual += scale * post(linear(x))"""
        if post is None:
            self._builder.product(linear, x, self._residual, "add", scale=scale)
        else:
            self._builder.product(linear, x, self._added)
            self._builder.norm(post, self._added, self._residual, self._config.hidden_size, added=scale)

    def _pack(self, linear: Linear, *, interleaved: bool = False) -> PackedLinear:
        return linear.pack(self._library, interleaved=interleaved, rounds_inputs=self._rounds_inputs)

    def _vector(self, linear: Linear) -> Tensor:
        """fp32[K], the weight of a product with a single output."""
        packed = linear.pack(self._library)
        weight = torch.empty(1, packed.num_inputs, dtype=torch.float32 if packed.kind == "fp32" else torch.bfloat16)
        self._library.unpack(packed, weight)
        return weight[0].float()

    def _kept(self, packed: PackedLinear) -> Linear:
        return UnpackingLinear(packed, self._library, self._memory)

    @cached_property
    def _residual(self) -> int:
        return self._builder.slot(self._config.hidden_size)

    @cached_property
    def _x(self) -> int:
        return self._builder.slot(self._config.hidden_size)

    @cached_property
    def _mlp_x(self) -> int:
        return self._builder.slot(self._config.hidden_size)

    @cached_property
    def _added(self) -> int:
        return self._builder.slot(self._config.hidden_size)

    @cached_property
    def _qkv(self) -> int:
        return self._builder.slot(max(_qkv_size(layer.mixer) for layer in self._config.layers))

    @cached_property
    def _attended(self) -> int:
        return self._builder.slot(max(_attended_size(layer.mixer) for layer in self._config.layers))

    @cached_property
    def _q_latent(self) -> int:
        return self._builder.slot(max(its.q_rank or 0 for its in self._latent_attentions))

    @cached_property
    def _latent(self) -> int:
        return self._builder.slot(max(its.kv.key_dim for its in self._latent_attentions))

    @cached_property
    def _inner(self) -> int:
        mlps = (layer.mlp.shared if isinstance(layer.mlp, Experts) else layer.mlp for layer in self._config.layers)
        return self._builder.slot(max(mlp.size for mlp in mlps if mlp is not None))

    @property
    def _latent_attentions(self) -> list[LatentAttention]:
        return [layer.mixer for layer in self._config.layers if isinstance(layer.mixer, LatentAttention)]


def _qkv_size(mixer: Attention | LatentAttention) -> int:
    if isinstance(mixer, LatentAttention):
        return mixer.num_heads * (mixer.nope_dim + mixer.rope_dim)
    return (mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim


def _attended_size(mixer: Attention | LatentAttention) -> int:
    return mixer.num_heads * (mixer.v_dim if isinstance(mixer, LatentAttention) else mixer.head_dim)
