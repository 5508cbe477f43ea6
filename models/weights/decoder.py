"""Where a described decoder's weights are in its checkpoint.

A description and the checkpoint's names (`Names`) determine every tensor, its shape, and how it is transformed
(`Source`). Checks and loading both use this.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from penstock.models.description.decoder import (
    Attention,
    BesideMLP,
    Decoder,
    DenseMLP,
    Experts,
    LatentAttention,
    Layer,
    LayerInputs,
    Norm,
)
from penstock.models.description.names import Names
from penstock.models.parsing.family import Shape
from penstock.models.parsing.rope import RopeConfig
from penstock.models.weights.recurrent import RecurrentSources, recurrent_sources
from penstock.models.weights.sources import (
    LinearSource,
    NormSource,
    Source,
    linear,
    norm_of,
    prefixed,
    vector,
)

CLASSES = "score.weight"
"""The matrix of a decoder that classifies a text by the state of its last token: [classes, hidden size]."""


class Product(NamedTuple):
    """A stored matrix that activations are multiplied with."""

    shape: Shape  # [..., outputs, inputs]
    is_transposed: bool  # as stored
    is_head: bool


class AttentionSources(NamedTuple):
    qkv: LinearSource
    o: LinearSource
    q_norm: NormSource | None
    k_norm: NormSource | None
    sinks: Source | None


class IndexerSources(NamedTuple):
    q: LinearSource  # from the queries' latent
    k: LinearSource
    k_norm: NormSource
    weights: LinearSource  # of the heads


class LatentSources(NamedTuple):
    q_a: LinearSource | None  # to the queries' latent; None: `q` multiplies hidden states
    q_a_norm: NormSource | None
    q: LinearSource
    kv_a: LinearSource  # to the latent, then to the rotated key
    kv_a_norm: NormSource
    kv_b: tuple[Source, ...]  # from the latent to each head's key, then its value; or two sources: see `Names.k_b`
    o: LinearSource
    indexer: IndexerSources | None  # None: there is none, or it is another layer's


class MLPSources(NamedTuple):
    gate_up: LinearSource
    down: LinearSource


class ExpertsSources(NamedTuple):
    router: LinearSource
    router_scale: Source | None  # of the router's inputs
    correction: Source | None
    expert_scales: Source | None
    gate_up: LinearSource
    down: LinearSource
    shared: MLPSources | None
    shared_gate: LinearSource | None


class BesideSources(NamedTuple):
    experts: ExpertsSources
    norm: NormSource | None
    post: NormSource | None
    mlp_post: NormSource | None


class LayerInputSources(NamedTuple):
    down: LinearSource
    up: LinearSource
    norm: NormSource | None


class LayerSources(NamedTuple):
    mixer_norm: NormSource | None
    mixer: AttentionSources | LatentSources | None
    recurrent: RecurrentSources | None  # instead of attention, or beside it
    post_mixer_norm: NormSource | None
    mlp_norm: NormSource | None
    mlp: MLPSources | ExpertsSources | None
    post_mlp_norm: NormSource | None
    beside_mlp: BesideSources | None
    layer_input: LayerInputSources | None
    output_scale: Source | None


class LayerTableSources(NamedTuple):
    table: Source
    projection: LinearSource
    norm: NormSource | None


class EntrySources(NamedTuple):
    embedding_norm: NormSource | None
    given_norm: NormSource | None
    projection: LinearSource | None


class DecoderSources(NamedTuple):
    embedding: Source | None  # None: this rank has none
    positions: Source | None
    layer_inputs: LayerTableSources | None
    layers: tuple[LayerSources, ...]
    final_norm: NormSource | None
    head: LinearSource | None  # None: the embedding, without a bias
    entry: EntrySources | None = None


def decoder_sources(decoder: Decoder) -> DecoderSources:
    """Return where each weight is."""
    hidden, names, places = decoder.hidden_size, decoder.names, decoder.positions
    return DecoderSources(
        embedding=vector(names.embedding, decoder.vocab_size, hidden) if decoder.has_embedding else None,
        positions=None if places is None else vector(names.positions, places.count + places.offset, hidden),
        layer_inputs=_layer_inputs(decoder),
        layers=tuple(_layer(layer, decoder, i) for i, layer in enumerate(decoder.layers)),
        final_norm=norm_of(decoder.final_norm, names.final_norm, hidden),
        head=_head(decoder) if decoder.has_head else None,
        entry=_entry(decoder),
    )


def _entry(decoder: Decoder) -> EntrySources | None:
    its, names, hidden = decoder.entry, decoder.names, decoder.hidden_size
    if its is None:
        return None
    return EntrySources(
        norm_of(its.embedding_norm, names.entry_embedding_norm, hidden),
        norm_of(its.given_norm, names.entry_given_norm, hidden),
        linear((names.entry_projection,), (hidden,), 2 * hidden, its.has_bias) if its.projects else None,
    )


def _head(decoder: Decoder) -> LinearSource | None:
    names, size, hidden = decoder.names, decoder.vocab_size, decoder.hidden_size
    if not decoder.tied_embeddings:
        return linear((names.head,), (size,), hidden, decoder.head_bias)
    if not decoder.head_bias:
        return None
    return LinearSource(vector(names.embedding, size, hidden), Source((f"{names.head}.bias",), ((size,),)))


def decoder_tensors(decoder: Decoder) -> dict[str, Shape]:
    """Return every tensor that the checkpoint must have, with its shape."""
    classes = {CLASSES: (decoder.num_classes, decoder.hidden_size)} if decoder.num_classes else {}
    return stored_tensors(decoder_sources(decoder)) | classes


def stored_tensors(sources: object) -> dict[str, Shape]:
    """Return the tensors of these sources, with their full shapes."""
    return {
        name: shape for source in all_sources(sources) for name, shape in zip(source.names, source.shapes, strict=True)
    }


def decoder_matrices(decoder: Decoder) -> dict[str, Shape]:
    """Return the tensors that are matrices, with shapes [..., outputs, inputs], however they are stored."""
    return {
        name: (*shape[:-2], *shape[:-3:-1]) if source.is_transposed else shape
        for source in all_sources(decoder_sources(decoder))
        for name, shape in zip(source.names, source.shapes, strict=True)
        if len(shape) > 1 and (len(shape) == 2 or shape[1] > 1)  # convolutions are not matrices
    }


def decoder_products(decoder: Decoder) -> dict[str, Product]:
    """Return the matrices that activations are multiplied with, by name, the head's last; routers are left out."""
    sources = decoder_sources(decoder)
    found = [(weight, False) for weight in _linears((sources.layer_inputs, sources.layers))]
    head = sources.embedding if sources.head is None else sources.head.weight
    found += [] if head is None else [(head, True)]
    return {
        name: Product((*shape[:-2], *shape[:-3:-1]) if weight.is_transposed else shape, weight.is_transposed, is_head)
        for weight, is_head in found
        for name, shape in zip(weight.names, weight.shapes, strict=True)
    }


def _linears(sources: object) -> Iterator[Source]:
    if isinstance(sources, LinearSource):
        yield sources.weight
    elif isinstance(sources, ExpertsSources):
        yield from _linears((sources.gate_up, sources.down, sources.shared))
    elif isinstance(sources, tuple) and not isinstance(sources, str):
        for part in sources:
            yield from _linears(part)


def all_sources(sources: object) -> Iterator[Source]:
    """Yield every source in these nested tuples."""
    if isinstance(sources, Source):
        yield sources
    elif isinstance(sources, tuple) and not isinstance(sources, str):
        for part in sources:
            yield from all_sources(part)


def _layer_inputs(decoder: Decoder) -> LayerTableSources | None:
    its, names = decoder.layer_inputs, decoder.names
    if its is None:
        return None
    width = len(decoder.layers) * its.size
    return LayerTableSources(
        table=vector(names.layer_table, its.vocab_size, width),
        projection=linear((names.layer_projection,), (width,), decoder.hidden_size, False),
        norm=norm_of(its.norm, names.layer_projection_norm, its.size),
    )


def _layer(layer: Layer, decoder: Decoder, number: int) -> LayerSources:
    hidden, names, prefix = decoder.hidden_size, decoder.names, decoder.names.layer.format(number)
    gets_pair = number == 0 and decoder.entry is not None and not decoder.entry.projects
    attention, recurrent = layer.attention, layer.recurrent
    num_inputs = 2 * hidden if gets_pair else hidden
    return LayerSources(
        mixer_norm=norm_of(layer.mixer_norm, prefix + names.mixer_norm, hidden),
        mixer=_latent_attention(attention, hidden, names, prefix)
        if isinstance(attention, LatentAttention)
        else None
        if attention is None
        else _attention(attention, hidden, names, prefix, num_inputs=num_inputs),
        recurrent=None if recurrent is None else recurrent_sources(recurrent, hidden, names, prefix),
        post_mixer_norm=norm_of(layer.post_mixer_norm, prefix + names.post_mixer_norm, hidden),
        mlp_norm=norm_of(layer.mlp_norm, prefix + names.mlp_norm, hidden),
        mlp=_experts(layer.mlp, hidden, names, prefix)
        if isinstance(layer.mlp, Experts)
        else None
        if layer.mlp is None
        else _mlp(layer.mlp, hidden, prefixed(prefix, names.gate_up), prefix + names.down, names.is_transposed),
        post_mlp_norm=norm_of(layer.post_mlp_norm, prefix + names.post_mlp_norm, hidden),
        beside_mlp=_beside_mlp(layer.beside_mlp, hidden, names, prefix),
        layer_input=_layer_input(decoder.layer_inputs, hidden, names, prefix),
        output_scale=Source((prefix + names.output_scale,), ((1,),)) if layer.has_output_scale else None,
    )


def _beside_mlp(beside: BesideMLP | None, hidden: int, names: Names, prefix: str) -> BesideSources | None:
    if beside is None:
        return None
    experts = _experts(beside.experts, hidden, names, prefix)
    return BesideSources(
        experts=experts._replace(router_scale=Source((prefix + names.router_scale,), ((hidden,),))),
        norm=norm_of(beside.norm, prefix + names.beside_norm, hidden),
        post=norm_of(beside.post, prefix + names.beside_post, hidden),
        mlp_post=norm_of(beside.mlp_post, prefix + names.beside_mlp_post, hidden),
    )


def _layer_input(inputs: LayerInputs | None, hidden: int, names: Names, prefix: str) -> LayerInputSources | None:
    if inputs is None:
        return None
    return LayerInputSources(
        down=linear((prefix + names.layer_input_down,), (inputs.size,), hidden, False),
        up=linear((prefix + names.layer_input_up,), (hidden,), inputs.size, False),
        norm=norm_of(inputs.norm, prefix + names.layer_input_norm, hidden),
    )


def _attention(mixer: Attention, hidden: int, names: Names, prefix: str, *, num_inputs: int) -> AttentionSources:
    dim, num_heads, num_kv_heads = mixer.head_dim, mixer.num_heads, mixer.num_kv_heads
    q_size, kv_size = num_heads * dim, num_kv_heads * dim
    of_qkv = names.qkv
    sizes: tuple[int, ...] = (q_size, kv_size, kv_size)
    if mixer.shares_kv_of is not None:
        of_qkv, sizes, num_kv_heads = of_qkv[:1], sizes[:1], 0
    elif mixer.values_are_keys:
        of_qkv = (*of_qkv[:2], of_qkv[1])
    if mixer.has_output_gate:
        sizes = (2 * q_size, *sizes[1:])
    order = _stored_heads(num_heads, num_kv_heads, dim, mixer.rope, names.qkv_by_head, has_gates=mixer.has_output_gate)

    def head_norm(norm: Norm | None, name: str, heads: int) -> NormSource | None:
        if norm is not None and mixer.norms_span == "each head":
            return _norms(norm, prefix + name, heads, dim, rope_order(1, dim, mixer.rope))
        heads = 1 if mixer.norms_span == "head" else heads
        return norm_of(norm, prefix + name, heads * dim, rope_order(heads, dim, mixer.rope))

    return AttentionSources(
        qkv=linear(prefixed(prefix, of_qkv), sizes, num_inputs, mixer.qkv_bias, names.is_transposed, order),
        o=linear((prefix + names.o,), (hidden,), q_size, mixer.o_bias, names.is_transposed),
        q_norm=head_norm(mixer.q_norm, names.q_norm, num_heads),
        k_norm=None if mixer.shares_kv_of is not None else head_norm(mixer.k_norm, names.k_norm, num_kv_heads),
        sinks=Source((prefix + names.sinks,), ((num_heads,),)) if mixer.has_sinks else None,
    )


def _latent_attention(mixer: LatentAttention, hidden: int, names: Names, prefix: str) -> LatentSources:
    heads, nope, rope = mixer.num_heads, mixer.nope_dim, mixer.rope
    queries, has_bias = (heads * (nope + mixer.rope_dim),), mixer.has_bias
    has_latent = mixer.q_rank is not None
    kv_a_norm = norm_of(mixer.norm, prefix + names.kv_a_norm, mixer.kv_rank)
    assert kv_a_norm is not None
    return LatentSources(
        q_a=linear((prefix + names.q_a,), (mixer.q_rank,), hidden, has_bias) if mixer.q_rank is not None else None,
        q_a_norm=norm_of(mixer.norm, prefix + names.q_a_norm, mixer.q_rank) if mixer.q_rank is not None else None,
        q=linear(
            (prefix + (names.q_b if has_latent else names.q),),
            queries,
            mixer.q_rank or hidden,
            False,
            order=_turned_ends(heads, nope, rope),
        ),
        kv_a=linear(
            (prefix + names.kv_a,),
            (mixer.kv_rank + mixer.rope_dim,),
            hidden,
            has_bias,
            order=_turned_ends(1, mixer.kv_rank, rope),
        ),
        kv_a_norm=kv_a_norm,
        kv_b=(
            vector(prefix + names.k_b, heads, mixer.kv_rank, nope),
            vector(prefix + names.v_b, heads, mixer.v_dim, mixer.kv_rank),
        )
        if names.k_b
        else (vector(prefix + names.kv_b, heads * (nope + mixer.v_dim), mixer.kv_rank),),
        o=linear((prefix + names.o,), (hidden,), heads * mixer.v_dim, has_bias),
        indexer=_indexer(mixer, hidden, names, prefix),
    )


def _indexer(mixer: LatentAttention, hidden: int, names: Names, prefix: str) -> IndexerSources | None:
    its = mixer.own_indexer
    if its is None or mixer.q_rank is None:
        return None
    rope = mixer.rope if its.is_interleaved else None
    k_norm = norm_of(its.norm, prefix + names.index_k_norm, its.head_dim, rope_order(1, its.head_dim, rope))
    assert k_norm is not None
    return IndexerSources(
        q=linear(
            (prefix + names.index_q,),
            (its.num_heads * its.head_dim,),
            mixer.q_rank,
            False,
            order=rope_order(its.num_heads, its.head_dim, rope),
        ),
        k=linear((prefix + names.index_k,), (its.head_dim,), hidden, False, order=rope_order(1, its.head_dim, rope)),
        k_norm=k_norm,
        weights=linear((prefix + names.index_weights,), (its.num_heads,), hidden, False),
    )


def _mlp(mlp: DenseMLP, hidden: int, gate_up: tuple[str, ...], down: str, is_transposed: bool) -> MLPSources:
    return MLPSources(
        linear(gate_up, (mlp.size,) * (1 + mlp.is_gated), hidden, mlp.has_bias, is_transposed),
        linear((down,), (hidden,), mlp.size, mlp.has_bias, is_transposed),
    )


def _experts(experts: Experts, hidden: int, names: Names, prefix: str) -> ExpertsSources:
    count, size, router, shared = experts.count, experts.size, experts.router, experts.shared
    gate_up, down = names.of_experts
    is_turned = names.experts == "turned"

    def of_experts(
        parts: tuple[str, ...], num_outputs: int, num_inputs: int, order: tuple[int, ...] | None
    ) -> LinearSource:
        parts = prefixed(prefix, parts)
        if "{}" in parts[0]:
            each = tuple(part.format(i) for i in range(count) for part in parts)
            shape = (num_outputs // len(parts), num_inputs)
            bias = Source(tuple(f"{name}.bias" for name in each), (shape[:1],) * len(each), num_stacked=count)
            weight = Source(tuple(f"{name}.weight" for name in each), (shape,) * len(each), num_stacked=count)
        else:
            (name,) = parts
            matrix = (num_inputs, num_outputs) if is_turned else (num_outputs, num_inputs)
            bias = Source((f"{name}_bias",), ((count, num_outputs),), order=order, axis=1)
            weight = Source((name,), ((count, *matrix),), is_turned, order, axis=1)
        return LinearSource(weight, bias if experts.has_bias else None)

    return ExpertsSources(
        router=linear((prefix + names.router,), (count,), hidden, router.has_bias),
        router_scale=None,
        expert_scales=Source((prefix + names.expert_scales,), ((count,),)) if router.has_expert_scales else None,
        correction=Source((prefix + names.correction,), ((1, count) if names.correction_is_row else (count,),))
        if router.has_correction
        else None,
        gate_up=of_experts(
            gate_up,
            size * (1 + experts.is_gated),
            hidden,
            _alternating(size) if names.experts_alternate else None,
        ),
        down=of_experts((down,), hidden, size, None),
        shared=None
        if shared is None
        else _mlp(
            shared, hidden, prefixed(prefix, names.shared_gate_up), prefix + names.shared_down, names.is_transposed
        ),
        shared_gate=linear((prefix + names.shared_gate,), (1,), hidden, False) if experts.shared_is_gated else None,
    )


def _norms(norm: Norm, name: str, count: int, size: int, order: tuple[int, ...] | None) -> NormSource:
    """Return several norms with their own weights: a tensor for each, or one of all."""

    def source(kind: str) -> Source:
        if "{}" not in name:
            return Source((f"{name}.{kind}",), ((count, size),), order=order, axis=1)
        names = tuple(f"{name.format(i)}.{kind}" for i in range(count))
        return Source(names, ((size,),) * count, order=order, axis=1, num_stacked=count)

    return NormSource(norm, source("weight") if norm.has_weight else None, source("bias") if norm.has_bias else None)


@cache
def rope_order(num_heads: int, dim: int, rope: RopeConfig | None) -> tuple[int, ...] | None:
    """Return the order that puts the first numbers of all pairs before the second ones; None if stored that way."""
    if rope is None or not (rope.is_interleaved or rope.spread_over):
        return None
    if rope.spread_over:
        half, rotated = dim // 2, rope.dim // 2
        firsts = (*range(rotated), *range(half, half + rotated))
        of_head = (*firsts, *range(rotated, half), *range(half + rotated, dim))
    else:
        of_head = (*range(0, rope.dim, 2), *range(1, rope.dim, 2), *range(rope.dim, dim))
    return tuple(head * dim + i for head in range(num_heads) for i in of_head)


@cache
def _turned_ends(num_heads: int, num_before: int, rope: RopeConfig | None) -> tuple[int, ...] | None:
    """Like `rope_order`, for heads whose last numbers rotate."""
    end = None if rope is None else rope_order(1, rope.dim, rope)
    if end is None:
        return None
    of_head = (*range(num_before), *(num_before + i for i in end))
    return tuple(head * len(of_head) + i for head in range(num_heads) for i in of_head)


@cache
def _stored_heads(
    num_heads: int, num_kv_heads: int, dim: int, rope: RopeConfig | None, by_head: bool, *, has_gates: bool
) -> tuple[int, ...] | None:
    """Return the order that puts all q heads first, then all k heads, then all v heads, with pairs half a head apart.

    Gates, each stored after its q head, come between all q heads and all k heads.
    """
    turned = rope_order(num_heads + num_kv_heads, dim, rope)
    if has_gates:
        if turned is not None or by_head:
            raise ValueError("q heads with gates are stored one after the other, with pairs half a head apart")
        heads = [(2 * head + part) * dim for part in range(2) for head in range(num_heads)]
        of_queries = (first + i for first in heads for i in range(dim))
        return (*of_queries, *range(2 * num_heads * dim, 2 * (num_heads + num_kv_heads) * dim))
    num_all = num_heads + 2 * num_kv_heads
    if turned is not None:
        turned = (*turned, *range(len(turned), num_all * dim))
    if not by_head:
        return turned
    shared = num_heads // num_kv_heads
    q_places = [group * (shared + 2) + head for group in range(num_kv_heads) for head in range(shared)]
    others = [group * (shared + 2) + shared + part for part in range(2) for group in range(num_kv_heads)]
    stored = [place * dim + i for place in (*q_places, *others) for i in range(dim)]
    return tuple(stored) if turned is None else tuple(stored[i] for i in turned)


@cache
def _alternating(size: int) -> tuple[int, ...]:
    """Return the order that puts all gates before all ups, if they are stored alternating."""
    return (*range(0, 2 * size, 2), *range(1, 2 * size, 2))
