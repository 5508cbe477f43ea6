"""From a decoder's description and weights to its program for the native CPU kernels."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from penstock.gpu_worker.models import native_recurrent
from penstock.gpu_worker.models.adapters import AdaptedLinear
from penstock.gpu_worker.models.blocks.attention import AttentionBlock, window_of
from penstock.gpu_worker.models.blocks.entry import EntryBlock
from penstock.gpu_worker.models.blocks.experts import BesideBlock, ExpertsBlock, routing_of
from penstock.gpu_worker.models.blocks.latent_attention import IndexerBlock, LatentAttentionBlock
from penstock.gpu_worker.models.blocks.layer_inputs import LayerInputBlock, LayerInputsBlock
from penstock.gpu_worker.models.blocks.mlp import MLPBlock
from penstock.gpu_worker.models.blocks.recurrent import (
    GatedDeltaBlock,
    KimiDeltaBlock,
    Mamba1Block,
    Mamba2Block,
    RecurrentBlock,
    ShortConvBlock,
    SideBySideBlock,
)
from penstock.gpu_worker.models.decoder import DecoderLayer, DecoderWeights
from penstock.gpu_worker.models.linear import Embedding, JoinedLinear, Linear
from penstock.gpu_worker.models.packed_embedding import PackedEmbedding
from penstock.gpu_worker.models.vocabulary import SharedEmbedding
from penstock.kernels.native.attention.latents import NativeIndexer, PackedLatents
from penstock.kernels.native.experts.packed import PackedExperts
from penstock.kernels.native.library import Library, PackedLinear
from penstock.kernels.native.program.builder import ACTIVATIONS, Finish, HeadShape, ProgramBuilder, QueryGrowth
from penstock.kernels.native.program.program import Program
from penstock.kernels.native.ranks.group import DistantRanks, SharedRanks
from penstock.kernels.native.recurrent import Part, open_gates
from penstock.kernels.norms import NormWeights
from penstock.models.description.decoder import (
    Attention,
    Decoder,
    DenseMLP,
    Experts,
    Indexer,
    LatentAttention,
    Layer,
    SideBySide,
)


def lacking(decoder: Decoder) -> str | None:
    """The first part of a model that has no native operation; None if all parts have one."""
    for layer in decoder.layers:
        if layer.recurrent is not None and (part := native_recurrent.lacking(layer.recurrent)) is not None:
            return part
        if isinstance(layer.mlp, DenseMLP) and layer.mlp.gate_scale != 1.0 and not layer.mlp.is_gated:
            return "a multiplier of an MLP without a gate"
        if isinstance(layer.mlp, DenseMLP) and layer.mlp.out_scale != 1.0 and layer.post_mlp_norm is not None:
            return "a norm of what an MLP with a multiplier makes"
        if isinstance(layer.mixer, SideBySide) and layer.post_mixer_norm is not None:
            return "a norm of what two mixers make"
        if layer.is_parallel and (layer.recurrent is not None or layer.mixer is None or layer.mlp is None):
            return "a mixer that keeps a state, or none, in parallel with an MLP"
        mixer = layer.attention
        if mixer is not None and _norms_over_ranks(decoder, mixer):
            return "a norm over heads of several workers"
        shared = layer.mlp.shared if isinstance(layer.mlp, Experts) and layer.mlp.shared_is_gated else None
        if shared is not None and shared.has_bias:
            return "a gated shared expert with biases"
    return None


def _norms_over_ranks(decoder: Decoder, mixer: Attention | LatentAttention) -> bool:
    is_split = decoder.shard is not None and decoder.shard.place.num_tensor > 1
    return is_split and isinstance(mixer, Attention) and mixer.norms_span == "all" and mixer.q_norm is not None


class ProgramWriter:
    """Packs a decoder's weights, layer by layer, and writes the operations that use them."""

    def __init__(
        self, config: Decoder, library: Library, ranks: SharedRanks | DistantRanks | None = None, *, rounds_inputs: bool
    ) -> None:
        """`rounds_inputs` is as in `Library.pack`, for all weights; `ranks` share each layer with this rank."""
        self._config = config
        self._library = library
        self._ranks = ranks
        self._rounds_inputs = rounds_inputs
        self._builder = ProgramBuilder(config.hidden_size)
        self._begins: list[int] = []  # index of each layer's first operation, and of the one after the last layer
        self.head: PackedLinear | None = None
        ropes = (its.rope for _, its in config.attentions)
        self.ropes = tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    def write(self, weights: DecoderWeights) -> tuple[Program, Embedding | None]:
        """The program, and the embedding, for others that have the same: it may be the packed output matrix."""
        config, builder = self._config, self._builder
        head = None if weights.head is None else self._pack(weights.head)
        embedding = weights.embedding
        if embedding is not None:
            if head is None and config.has_head:
                head = self._pack(embedding.head())
                packed = PackedEmbedding(head, self._library)
                embedding = embedding._replace(rows=packed) if isinstance(embedding, SharedEmbedding) else packed
            table = head if weights.head is None and head is not None else embedding.pack(self._library)
            first = 0 if config.shard is None else config.shard.vocab[0]
            to = self._residual if config.entry is None else self._embedded
            builder.embed(table, to, config.embedding_scale, first=first)
            self._reduce(to, config.hidden_size)
        if weights.positions is not None and config.positions is not None:
            builder.add_positions(weights.positions, self._residual, config.positions.offset)
        if weights.layer_inputs is not None:
            self._layer_inputs(weights.layer_inputs)
        if weights.entry is not None:
            self._begin(weights.entry)
        if config.shard is not None and not config.shard.place.is_first_stage:
            builder.norm(None, ProgramBuilder.OUT, self._residual, config.hidden_size)  # the stage's input
        for number, (layer, its) in enumerate(zip(config.layers, weights.layers, strict=True)):
            self._layer(number, layer, its)
        self._begins.append(builder.num_operations)
        builder.norm(weights.final_norm, self._residual, ProgramBuilder.OUT, config.hidden_size)
        self.head = head
        return self._built(), embedding

    def _begin(self, block: EntryBlock) -> None:
        """Write the residual stream, and the pair of the given hidden state and the embedding."""
        builder, hidden, its = self._builder, self._config.hidden_size, block.entry
        given = ProgramBuilder.OUT
        if its.is_residual:
            builder.norm(block.given_norm, given, given, hidden)
        normed = None if its.is_residual else block.given_norm
        builder.norm(normed, given, self._pair, hidden, first=0 if its.given_is_first else hidden)
        builder.norm(block.embedding_norm, self._embedded, self._pair, hidden, first=hidden * its.given_is_first)
        if block.projection is None:
            builder.norm(None, given, self._residual, hidden)
        else:
            builder.product(self._pack(block.projection), self._pair, self._residual)

    def _layer(self, number: int, layer: Layer, weights: DecoderLayer) -> None:
        self._begins.append(self._builder.num_operations)
        scale = layer.residual_scale
        posts = (weights.post_mixer_norm, weights.post_mlp_norm)
        is_joint = self._ranks is not None and layer.is_parallel and posts == (None, None)
        entry = self._config.entry if number == 0 else None
        gets_pair = entry is not None and not entry.projects
        x = self._residual
        if weights.mixer is not None:
            x = self._pair if gets_pair else self._normed(weights.mixer_norm, self._x)
        # If attention and MLP are parallel, both norms come before anything is added to the residual stream.
        mlp_x = x if weights.mlp_norm is None or not layer.is_parallel else self._normed(weights.mlp_norm, self._mlp_x)
        mixer = weights.mixer
        if isinstance(mixer, SideBySideBlock):
            self._side_by_side(number, mixer, x, scale)
        elif isinstance(mixer, Mamba1Block | Mamba2Block | GatedDeltaBlock | KimiDeltaBlock | ShortConvBlock):
            self._add_recurrent(number, mixer, x, scale, weights.post_mixer_norm)
        elif mixer is not None:
            if isinstance(mixer, AttentionBlock):
                o = self._attention(number, mixer, x)
            else:
                o = self._latent_attention(number, mixer, x)
            if is_joint:  # the MLP's output is added to it before the sum over ranks
                self._builder.product(o, self._attended, self._added)
            else:
                self._add(o, self._attended, scale, weights.post_mixer_norm)
        mlp = weights.mlp
        if mlp is not None and not layer.is_parallel:
            mlp_x = self._normed(weights.mlp_norm, self._x)
        if weights.beside_mlp is not None:
            assert isinstance(mlp, MLPBlock)
            self._mlps_beside(mlp, weights.beside_mlp, mlp_x, scale, weights.post_mlp_norm)
        elif isinstance(mlp, ExpertsBlock):
            self._experts(mlp, mlp_x, scale, weights.post_mlp_norm, is_joint=is_joint)
        elif mlp is not None:
            assert isinstance(mlp, MLPBlock)
            self._mlp(mlp, mlp_x, scale, weights.post_mlp_norm, is_joint=is_joint)
        if weights.input is not None:
            self._layer_input(number, weights.input)
        if weights.output_scale is not None:
            self._builder.scale(self._residual, self._config.hidden_size, weights.output_scale)

    def tapped(self, layers: Sequence[int]) -> tuple[Program, int]:
        """The written program, changed to hand out the inputs of these layers; and how many floats a token that is."""
        places = [self._begins[layer] for layer in layers]
        width = self._builder.tap(places, self._residual, self._config.hidden_size)
        self._begins = [begin + sum(place < begin for place in places) for begin in self._begins]
        return self._built(), width

    def deepened(self, num_layers: int) -> Program:
        """The written program, changed to add a batch's given vectors after each of the first `num_layers` layers."""
        places = self._begins[1 : 1 + num_layers]
        return self._built(self._builder.with_given(places, self._residual, self._config.hidden_size))

    def _built(self, builder: ProgramBuilder | None = None) -> Program:
        config = self._config
        return (builder or self._builder).build(
            self._library, self.head, logit_scale=config.logit_scale, logit_softcap=config.logit_softcap
        )

    def _layer_inputs(self, block: LayerInputsBlock) -> None:
        """The vectors of all layers, one after the other."""
        size, count, builder = block.inputs.size, len(self._config.layers), self._builder
        builder.product(self._pack(block.projection), self._residual, self._projected)
        builder.scale(self._projected, size * count, self._config.hidden_size**-0.5)
        shard = self._config.shard
        first = 0 if shard is None else shard.layer_vocab[0]
        table, scale = block.table.pack(self._library), (size / 2) ** 0.5
        builder.embed(table, self._inputs, scale, first=first, without_id=block.inputs.image_row)
        self._reduce(self._inputs, size * count)
        builder.norm(block.norm, self._projected, self._inputs, size, added=2**-0.5, count=count)

    def _layer_input(self, number: int, block: LayerInputBlock) -> None:
        its, builder = block.inputs, self._builder
        builder.product(self._pack(block.down), self._residual, self._inner, "activate", activation=its.activation)
        builder.scale(self._inner, its.size, 1.0, self._inputs, number * its.size)
        builder.product(self._pack(block.up), self._inner, self._added)  # every rank has the whole weight
        builder.norm(block.norm, self._added, self._residual, self._config.hidden_size, added=1.0)

    def _mlps_beside(self, mlp: MLPBlock, beside: BesideBlock, x: int, scale: float, post: NormWeights | None) -> None:
        """residual += scale * post(mlp(x) + experts(residual)), where both have norms of their own."""
        builder, hidden = self._builder, self._config.hidden_size
        self._activated(mlp, x)
        builder.product(self._pack(mlp.down), self._inner, self._added)
        self._reduce(self._added, hidden)
        builder.norm(beside.mlp_post, self._added, self._added, hidden)
        x, judged = self._normed(beside.norm, self._x), self._normed(beside.router_norm, self._judged)
        builder.mix(self._packed_experts(beside.experts), x, self._mixed, judged=judged)
        self._reduce(self._mixed, hidden)
        builder.norm(beside.post, self._mixed, self._added, hidden, added=1.0)
        builder.norm(post, self._added, self._residual, hidden, added=scale)

    def _attention(self, number: int, block: AttentionBlock, x: int) -> PackedLinear:
        """attended = attention(x) without its last product; returns that product."""
        its, builder = block.attention, self._builder
        shape = HeadShape(its.num_heads, its.num_kv_heads, its.head_dim)
        pages = self._config.kv_index[number]
        writes = its.shares_kv_of is None
        growth = its.query_growth
        grown = QueryGrowth() if growth is None else QueryGrowth(growth.beta, growth.length, growth.shift)
        self._joined_product(block.qkv, x, self._qkv)
        q_size = its.num_heads * its.head_dim
        builder.heads(
            *(self._qkv, shape if writes else shape._replace(num_kv_heads=0), pages, block.norms),
            *(None if its.rope is None else self.ropes.index(its.rope), grown, block.kv_scales),
            gap=q_size if its.has_output_gate else 0,
        )
        builder.attend(
            *(self._qkv, self._attended, shape, pages),
            scale=its.scale,
            window=window_of(its),
            softcap=its.softcap,
            sinks=block.sinks,
        )
        if its.has_output_gate:
            open_gates(builder, self._attended, Part(self._qkv, q_size), q_size)
        return self._pack(block.o)

    def _add_recurrent(
        self, number: int, block: RecurrentBlock, x: int, scale: float, post: NormWeights | None
    ) -> None:
        """residual += scale * post(block(x))"""
        self._recurrent.write(number, block, x)
        self._add(self._pack(block.out), self._recurrent.made, scale, post)

    def _side_by_side(self, number: int, block: SideBySideBlock, x: int, scale: float) -> None:
        """Add an attention and a recurrent mixer to the residual stream, each with its own scale; both read slot x."""
        its = block.mixer
        o = self._attention(number, block.attention, x)
        self._add(o, self._attended, scale * its.attention_scale, None)
        self._add_recurrent(number, block.recurrent, x, scale * its.recurrent_scale, None)

    def _latent_attention(self, number: int, block: LatentAttentionBlock, x: int) -> PackedLinear:
        """attended = attention(x) without its last product; returns that product."""
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
            index_dim=0 if its.indexer is None else its.indexer.head_dim,
            top_k=0 if its.indexer is None else its.indexer.top_k,
        )
        rotary, pages = None if its.rope is None else self.ropes.index(its.rope), self._config.kv_index[number]
        if block.indexer is not None:
            assert rotary is not None
            self._choose(pages, its, block.indexer, x, of_queries, rotary)
        builder.attend_to_latents(packed, self._latent, self._qkv, self._attended, pages, rotary)
        return self._pack(block.o)

    def _choose(
        self, pages: int, its: LatentAttention, block: IndexerBlock, x: int, of_queries: int, rotary: int
    ) -> None:
        builder, norm, indexer = self._builder, block.k_norm, its.indexer
        assert indexer is not None
        assert norm.weight is not None
        assert norm.bias is not None
        builder.product(self._pack(block.q), of_queries, self._index_q)
        builder.product(self._pack(block.k), x, self._index_k)
        builder.product(block.weights.pack(self._library), x, self._index_weights)
        native = NativeIndexer(
            *(norm.weight.float(), norm.bias.float(), norm.eps),
            num_heads=indexer.num_heads,
            rope_dim=its.rope_dim,
            top_k=indexer.top_k,
            first=its.key_dim,
        )
        builder.choose(native, self._index_k, self._index_q, self._index_weights, pages, rotary)

    def _mlp(self, block: MLPBlock, x: int, scale: float, post: NormWeights | None, *, is_joint: bool) -> None:
        self._activated(block, x)
        down = self._pack(block.down)
        if is_joint:
            self._builder.product(down, self._inner, self._added, "add", scale=block.mlp.out_scale)
            self._add_up(scale, post)
        else:
            self._add(down, self._inner, scale * block.mlp.out_scale, post)

    def _activated(self, block: MLPBlock, x: int) -> None:
        """inner = act(gate) * up, or act(up)"""
        builder, mlp, gate_up = self._builder, block.mlp, block.gate_up
        if isinstance(gate_up, JoinedLinear):
            gate, up = map(self._pack, gate_up.parts)
            builder.product(gate, x, self._inner)
            builder.product(up, x, self._inner, "gate_stored", activation=mlp.activation, scale=mlp.gate_scale)
            return
        packed = self._pack(gate_up, interleaved=mlp.is_gated)
        finish: Finish = "gate" if mlp.is_gated else "activate"
        builder.product(packed, x, self._inner, finish, activation=mlp.activation, scale=mlp.gate_scale)

    def _joined_product(self, linear: Linear, x: int, to: int) -> None:
        """to = linear(x), part by part"""
        parts = linear.parts if isinstance(linear, JoinedLinear) else (linear,)
        first = 0
        for packed in map(self._pack, parts):
            self._builder.product(packed, x, to, first=first)
            first += packed.num_outputs

    def _experts(self, block: ExpertsBlock, x: int, scale: float, post: NormWeights | None, *, is_joint: bool) -> None:
        """residual += scale * post(experts(x) + shared(x))"""
        builder = self._builder
        experts = self._packed_experts(block)
        is_direct = post is None and self._ranks is None
        to, by = (self._residual, scale) if is_direct else (self._added, 1.0)
        builder.mix(experts, x, to, added=by if is_direct or is_joint else None)
        if (shared := block.shared) is not None:
            self._activated(shared, x)
            if block.shared_gate is not None:  # it may scale early, since the rest is linear
                builder.gate(self._vector(block.shared_gate), x, self._inner, shared.mlp.size)
            builder.product(self._pack(shared.down), self._inner, to, "add", scale=by)
        if not is_direct:
            self._add_up(scale, post)

    def _packed_experts(self, block: ExpertsBlock) -> PackedExperts:
        its, rounds = block.experts, self._rounds_inputs
        return PackedExperts(
            block.router.pack(self._library),
            block.gate_up.pack(self._library, interleaved=its.is_gated, rounds_inputs=rounds),
            block.down.pack(self._library, rounds_inputs=rounds),
            routing_of(its.router),
            block.correction,
            ACTIVATIONS.index(its.activation),
            is_gated=its.is_gated,
            expert_scales=block.expert_scales,
            multiplies_input=its.router.multiplies_input,
            held=block.held,
        )

    def _normed(self, norm: NormWeights | None, to: int) -> int:
        """The slot with the residual stream after the norm."""
        if norm is None:
            return self._residual
        self._builder.norm(norm, self._residual, to, self._config.hidden_size)
        return to

    def _add(self, linear: PackedLinear, x: int, scale: float, post: NormWeights | None) -> None:
        """residual += scale * post(linear(x)), where each rank has a part of the inputs."""
        if post is None and self._ranks is None:
            self._builder.product(linear, x, self._residual, "add", scale=scale)
        else:
            self._builder.product(linear, x, self._added)
            self._add_up(scale, post)

    def _add_up(self, scale: float, post: NormWeights | None) -> None:
        """residual += scale * post(sum over ranks of the slot `added`)."""
        hidden = self._config.hidden_size
        if post is None and self._ranks is not None:
            self._builder.reduce(self._ranks, self._added, self._residual, hidden, added=scale)
        else:
            self._reduce(self._added, hidden)
            self._builder.norm(post, self._added, self._residual, hidden, added=scale)

    def _reduce(self, slot: int, size: int) -> None:
        if self._ranks is not None:
            self._builder.reduce(self._ranks, slot, slot, size)

    def _pack(self, linear: Linear, *, interleaved: bool = False) -> PackedLinear:
        if isinstance(linear, AdaptedLinear):
            self._builder.adapt(linear.adapters.native)
        return linear.pack(self._library, interleaved=interleaved, rounds_inputs=self._rounds_inputs)

    def _vector(self, linear: Linear) -> Tensor:
        """fp32[K], the weight of a product with a single output."""
        packed = linear.pack(self._library)
        weight = torch.empty(1, packed.num_inputs, dtype=torch.bfloat16 if packed.kind == "bf16" else torch.float32)
        self._library.unpack(packed, weight)
        return weight[0].float()

    @cached_property
    def _residual(self) -> int:
        return self._builder.slot(self._config.hidden_size)

    @cached_property
    def _embedded(self) -> int:
        return self._builder.slot(self._config.hidden_size)

    @cached_property
    def _pair(self) -> int:
        return self._builder.slot(2 * self._config.hidden_size)

    @cached_property
    def _x(self) -> int:
        return self._builder.slot(self._config.hidden_size)

    @cached_property
    def _mlp_x(self) -> int:
        return self._builder.slot(self._config.hidden_size)

    @cached_property
    def _judged(self) -> int:
        return self._builder.slot(self._config.hidden_size)

    @cached_property
    def _mixed(self) -> int:
        return self._builder.slot(self._config.hidden_size)

    @cached_property
    def _inputs(self) -> int:
        return self._builder.slot(self._input_size * len(self._config.layers))

    @cached_property
    def _projected(self) -> int:
        return self._builder.slot(self._input_size * len(self._config.layers))

    @cached_property
    def _added(self) -> int:
        return self._builder.slot(self._config.hidden_size)

    @cached_property
    def _recurrent(self) -> native_recurrent.RecurrentWriter:
        return native_recurrent.RecurrentWriter(self._config, self._builder, self._joined_product)

    @cached_property
    def _qkv(self) -> int:
        return self._builder.slot(max(_qkv_size(its) for _, its in self._config.attentions))

    @cached_property
    def _attended(self) -> int:
        return self._builder.slot(max(_attended_size(its) for _, its in self._config.attentions))

    @cached_property
    def _q_latent(self) -> int:
        return self._builder.slot(max(its.q_rank or 0 for its in self._latent_attentions))

    @cached_property
    def _latent(self) -> int:
        return self._builder.slot(max(its.key_dim for its in self._latent_attentions))

    @cached_property
    def _index_q(self) -> int:
        return self._builder.slot(max(its.num_heads * its.head_dim for its in self._indexers))

    @cached_property
    def _index_k(self) -> int:
        return self._builder.slot(max(its.head_dim for its in self._indexers))

    @cached_property
    def _index_weights(self) -> int:
        return self._builder.slot(max(its.num_heads for its in self._indexers))

    @cached_property
    def _inner(self) -> int:
        mlps = (layer.mlp.shared if isinstance(layer.mlp, Experts) else layer.mlp for layer in self._config.layers)
        return self._builder.slot(max((self._input_size, *(mlp.size for mlp in mlps if mlp is not None))))

    @property
    def _input_size(self) -> int:
        inputs = self._config.layer_inputs
        return 0 if inputs is None else inputs.size

    @property
    def _latent_attentions(self) -> list[LatentAttention]:
        return [its for _, its in self._config.attentions if isinstance(its, LatentAttention)]

    @property
    def _indexers(self) -> list[Indexer]:
        return [its.indexer for its in self._latent_attentions if its.indexer is not None]


def _qkv_size(mixer: Attention | LatentAttention) -> int:
    if isinstance(mixer, LatentAttention):
        return mixer.num_heads * (mixer.nope_dim + mixer.rope_dim)
    return ((1 + mixer.has_output_gate) * mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim


def _attended_size(mixer: Attention | LatentAttention) -> int:
    return mixer.num_heads * (mixer.v_dim if isinstance(mixer, LatentAttention) else mixer.head_dim)
