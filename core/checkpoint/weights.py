"""Where a described decoder's weights are in its checkpoint.

From a description, and what checkpoints call its weights (`Names`), follows every tensor, with its shape, and what must
be done to it (`Source`). The same is used to check a checkpoint and to read it.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from penstock.core.checkpoint.decoder import (
    Attention,
    BesideMLP,
    Decoder,
    DenseMLP,
    Experts,
    LatentAttention,
    Layer,
    LayerInputs,
    Norm,
    Range,
)
from penstock.core.checkpoint.names import Names
from penstock.core.checkpoint.parsing.family import Shape
from penstock.core.checkpoint.parsing.rope import RopeConfig

Ranges = tuple[Range, ...]


class Cut(NamedTuple):
    """Which part of a tensor is read, for each kind of axis; None: all."""

    items: Ranges | None = None  # experts, or heads with norms of their own, if one tensor holds all of them
    outputs: Ranges | None = None
    inputs: Ranges | None = None


WHOLE = Cut()


class Source(NamedTuple):
    """A weight: tensors of the checkpoint, stacked along the axis of their outputs."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]  # of each tensor, as it is stored
    is_transposed: bool = False  # the last two axes must be swapped
    order: tuple[int, ...] | None = None  # output i of the weight is output order[i] of the stack
    axis: int = 0  # of the outputs
    num_stacked: int = 0  # experts, each with equally many of the tensors: they get an axis of their own, the first
    cuts: tuple[Cut, ...] = ()  # what is read of each tensor; empty: all of all

    @property
    def has_items(self) -> bool:
        """Whether the first axis of each tensor is that of experts or heads."""
        return self.axis == 1 and not self.num_stacked

    def cut(self, i: int) -> Cut:
        """What is read of tensor `i`."""
        return self.cuts[i] if self.cuts else WHOLE

    def stored_ranges(self, i: int) -> tuple[Ranges | None, ...]:
        """What is read of tensor `i`, for each of its axes as it is stored."""
        cut, num_axes = self.cut(i), len(self.shapes[i])
        ranges: list[Ranges | None] = [cut.items] if self.has_items else []
        of_matrix = [cut.inputs, cut.outputs] if self.is_transposed else [cut.outputs, cut.inputs]
        ranges += of_matrix[: num_axes - len(ranges)]
        return (*ranges, *(None,) * (num_axes - len(ranges)))

    def part_shape(self, i: int) -> Shape:
        """The shape of what is read of tensor `i`, as it is stored."""
        pairs = zip(self.shapes[i], self.stored_ranges(i), strict=True)
        return tuple(size if ranges is None else sum(end - begin for begin, end in ranges) for size, ranges in pairs)

    def num_outputs(self, i: int) -> int:
        """Of tensor `i`, all of them."""
        return self.shapes[i][-1 if self.is_transposed else int(self.has_items)]


class LinearSource(NamedTuple):
    """A matrix [out, in], for experts [experts, out, in]."""

    weight: Source
    bias: Source | None = None


class NormSource(NamedTuple):
    """A norm's weights."""

    norm: Norm
    weight: Source | None
    bias: Source | None


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


class LatentSources(NamedTuple):
    q_a: LinearSource | None  # to the latent of queries; None: `q` multiplies hidden states
    q_a_norm: NormSource | None
    q: LinearSource
    kv_a: LinearSource  # to the latent, then the key that is rotated
    kv_a_norm: NormSource
    kv_b: tuple[Source, ...]  # from the latent, for each head to its key, then its value; or two: see `Names.k_b`
    o: LinearSource


class MLPSources(NamedTuple):
    gate_up: LinearSource
    down: LinearSource


class ExpertsSources(NamedTuple):
    router: LinearSource
    router_scale: Source | None  # of its inputs
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
    mixer: AttentionSources | LatentSources
    post_mixer_norm: NormSource | None
    mlp_norm: NormSource | None
    mlp: MLPSources | ExpertsSources
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
    """Where each weight is."""
    hidden, names, places = decoder.hidden_size, decoder.names, decoder.positions
    return DecoderSources(
        embedding=_vector(names.embedding, decoder.vocab_size, hidden) if decoder.has_embedding else None,
        positions=None if places is None else _vector(names.positions, places.count + places.offset, hidden),
        layer_inputs=_layer_inputs(decoder),
        layers=tuple(_layer(layer, decoder, i) for i, layer in enumerate(decoder.layers)),
        final_norm=_norm(decoder.final_norm, names.final_norm, hidden),
        head=_head(decoder) if decoder.has_head else None,
        entry=_entry(decoder),
    )


def _entry(decoder: Decoder) -> EntrySources | None:
    its, names, hidden = decoder.entry, decoder.names, decoder.hidden_size
    if its is None:
        return None
    return EntrySources(
        _norm(its.embedding_norm, names.entry_embedding_norm, hidden),
        _norm(its.given_norm, names.entry_given_norm, hidden),
        _linear((names.entry_projection,), (hidden,), 2 * hidden, its.has_bias) if its.projects else None,
    )


def _head(decoder: Decoder) -> LinearSource | None:
    names, size, hidden = decoder.names, decoder.vocab_size, decoder.hidden_size
    if not decoder.tied_embeddings:
        return _linear((names.head,), (size,), hidden, decoder.head_bias)
    if not decoder.head_bias:
        return None
    return LinearSource(_vector(names.embedding, size, hidden), Source((f"{names.head}.bias",), ((size,),)))


def decoder_tensors(decoder: Decoder) -> dict[str, Shape]:
    """Every tensor that the checkpoint must have, with its shape."""
    return stored_tensors(decoder_sources(decoder))


def stored_tensors(sources: object) -> dict[str, Shape]:
    """The tensors of these sources, with their whole shapes."""
    return {
        name: shape for source in all_sources(sources) for name, shape in zip(source.names, source.shapes, strict=True)
    }


def decoder_matrices(decoder: Decoder) -> dict[str, Shape]:
    """Those of the tensors that are matrices, with shapes [..., outputs, inputs], however they are stored."""
    return {
        name: (*shape[:-2], *shape[:-3:-1]) if source.is_transposed else shape
        for source in all_sources(decoder_sources(decoder))
        for name, shape in zip(source.names, source.shapes, strict=True)
        if len(shape) > 1
    }


def decoder_products(decoder: Decoder) -> dict[str, Product]:
    """Matrices that activations are multiplied with, by their names, the head's last; those that route are left out."""
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
    """Each that is somewhere in these tuples."""
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
        table=_vector(names.layer_table, its.vocab_size, width),
        projection=_linear((names.layer_projection,), (width,), decoder.hidden_size, False),
        norm=_norm(its.norm, names.layer_projection_norm, its.size),
    )


def _layer(layer: Layer, decoder: Decoder, number: int) -> LayerSources:
    hidden, names, prefix = decoder.hidden_size, decoder.names, decoder.names.layer.format(number)
    gets_pair = number == 0 and decoder.entry is not None and not decoder.entry.projects
    return LayerSources(
        mixer_norm=_norm(layer.mixer_norm, prefix + names.mixer_norm, hidden),
        mixer=_latent_attention(layer.mixer, hidden, names, prefix)
        if isinstance(layer.mixer, LatentAttention)
        else _attention(layer.mixer, hidden, names, prefix, num_inputs=2 * hidden if gets_pair else hidden),
        post_mixer_norm=_norm(layer.post_mixer_norm, prefix + names.post_mixer_norm, hidden),
        mlp_norm=_norm(layer.mlp_norm, prefix + names.mlp_norm, hidden),
        mlp=_experts(layer.mlp, hidden, names, prefix)
        if isinstance(layer.mlp, Experts)
        else _mlp(layer.mlp, hidden, _with(prefix, names.gate_up), prefix + names.down, names.is_transposed),
        post_mlp_norm=_norm(layer.post_mlp_norm, prefix + names.post_mlp_norm, hidden),
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
        norm=_norm(beside.norm, prefix + names.beside_norm, hidden),
        post=_norm(beside.post, prefix + names.beside_post, hidden),
        mlp_post=_norm(beside.mlp_post, prefix + names.beside_mlp_post, hidden),
    )


def _layer_input(inputs: LayerInputs | None, hidden: int, names: Names, prefix: str) -> LayerInputSources | None:
    if inputs is None:
        return None
    return LayerInputSources(
        down=_linear((prefix + names.layer_input_down,), (inputs.size,), hidden, False),
        up=_linear((prefix + names.layer_input_up,), (hidden,), inputs.size, False),
        norm=_norm(inputs.norm, prefix + names.layer_input_norm, hidden),
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
    order = _stored_heads(num_heads, num_kv_heads, dim, mixer.rope, names.qkv_by_head)

    def head_norm(norm: Norm | None, name: str, heads: int) -> NormSource | None:
        if norm is not None and mixer.norms_span == "each head":
            return _norms(norm, prefix + name, heads, dim, rope_order(1, dim, mixer.rope))
        heads = 1 if mixer.norms_span == "head" else heads
        return _norm(norm, prefix + name, heads * dim, rope_order(heads, dim, mixer.rope))

    return AttentionSources(
        qkv=_linear(_with(prefix, of_qkv), sizes, num_inputs, mixer.qkv_bias, names.is_transposed, order),
        o=_linear((prefix + names.o,), (hidden,), q_size, mixer.o_bias, names.is_transposed),
        q_norm=head_norm(mixer.q_norm, names.q_norm, num_heads),
        k_norm=None if mixer.shares_kv_of is not None else head_norm(mixer.k_norm, names.k_norm, num_kv_heads),
        sinks=Source((prefix + names.sinks,), ((num_heads,),)) if mixer.has_sinks else None,
    )


def _latent_attention(mixer: LatentAttention, hidden: int, names: Names, prefix: str) -> LatentSources:
    heads, nope, rope = mixer.num_heads, mixer.nope_dim, mixer.rope
    queries, has_bias = (heads * (nope + mixer.rope_dim),), mixer.has_bias
    has_latent = mixer.q_rank is not None
    kv_a_norm = _norm(mixer.norm, prefix + names.kv_a_norm, mixer.kv_rank)
    assert kv_a_norm is not None
    return LatentSources(
        q_a=_linear((prefix + names.q_a,), (mixer.q_rank,), hidden, has_bias) if mixer.q_rank is not None else None,
        q_a_norm=_norm(mixer.norm, prefix + names.q_a_norm, mixer.q_rank) if mixer.q_rank is not None else None,
        q=_linear(
            (prefix + (names.q_b if has_latent else names.q),),
            queries,
            mixer.q_rank or hidden,
            False,
            order=_turned_ends(heads, nope, rope),
        ),
        kv_a=_linear(
            (prefix + names.kv_a,),
            (mixer.kv_rank + mixer.rope_dim,),
            hidden,
            has_bias,
            order=_turned_ends(1, mixer.kv_rank, rope),
        ),
        kv_a_norm=kv_a_norm,
        kv_b=(
            _vector(prefix + names.k_b, heads, mixer.kv_rank, nope),
            _vector(prefix + names.v_b, heads, mixer.v_dim, mixer.kv_rank),
        )
        if names.k_b
        else (_vector(prefix + names.kv_b, heads * (nope + mixer.v_dim), mixer.kv_rank),),
        o=_linear((prefix + names.o,), (hidden,), heads * mixer.v_dim, has_bias),
    )


def _mlp(mlp: DenseMLP, hidden: int, gate_up: tuple[str, ...], down: str, is_transposed: bool) -> MLPSources:
    return MLPSources(
        _linear(gate_up, (mlp.size,) * (1 + mlp.is_gated), hidden, mlp.has_bias, is_transposed),
        _linear((down,), (hidden,), mlp.size, mlp.has_bias, is_transposed),
    )


def _experts(experts: Experts, hidden: int, names: Names, prefix: str) -> ExpertsSources:
    count, size, router, shared = experts.count, experts.size, experts.router, experts.shared
    of_all = names.experts_are_transposed

    def of_experts(
        parts: tuple[str, ...], num_outputs: int, num_inputs: int, order: tuple[int, ...] | None
    ) -> LinearSource:
        parts = _with(prefix, parts)
        if "{}" in parts[0]:
            each = tuple(part.format(i) for i in range(count) for part in parts)
            shape = (num_outputs // len(parts), num_inputs)
            bias = Source(tuple(f"{name}.bias" for name in each), (shape[:1],) * len(each), num_stacked=count)
            weight = Source(tuple(f"{name}.weight" for name in each), (shape,) * len(each), num_stacked=count)
        else:
            (name,) = parts
            turned = (num_inputs, num_outputs) if of_all else (num_outputs, num_inputs)
            bias = Source((f"{name}_bias",), ((count, num_outputs),), order=order, axis=1)
            weight = Source((name,), ((count, *turned),), of_all, order, axis=1)
        return LinearSource(weight, bias if experts.has_bias else None)

    return ExpertsSources(
        router=_linear((prefix + names.router,), (count,), hidden, router.has_bias),
        router_scale=None,
        expert_scales=Source((prefix + names.expert_scales,), ((count,),)) if router.has_expert_scales else None,
        correction=Source((prefix + names.correction,), ((1, count) if names.correction_is_row else (count,),))
        if router.has_correction
        else None,
        gate_up=of_experts(
            names.expert_gate_up, 2 * size, hidden, _alternating(size) if names.experts_alternate else None
        ),
        down=of_experts((names.expert_down,), hidden, size, None),
        shared=None
        if shared is None
        else _mlp(shared, hidden, _with(prefix, names.shared_gate_up), prefix + names.shared_down, names.is_transposed),
        shared_gate=_linear((prefix + names.shared_gate,), (1,), hidden, False) if experts.shared_is_gated else None,
    )


def _linear(
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    num_inputs: int,
    has_bias: bool,
    is_transposed: bool = False,
    order: tuple[int, ...] | None = None,
) -> LinearSource:
    """The parts of these sizes, each stored by itself, or all in one tensor."""
    if len(names) == 1:
        sizes = (sum(sizes),)
    weights = tuple((num_inputs, size) if is_transposed else (size, num_inputs) for size in sizes)
    weight = Source(tuple(f"{name}.weight" for name in names), weights, is_transposed, order)
    bias = Source(tuple(f"{name}.bias" for name in names), tuple((size,) for size in sizes), order=order)
    return LinearSource(weight, bias if has_bias else None)


def _vector(name: str, *shape: int, order: tuple[int, ...] | None = None) -> Source:
    return Source((f"{name}.weight",), (shape,), order=order)


def _norm(norm: Norm | None, name: str, size: int, order: tuple[int, ...] | None = None) -> NormSource | None:
    if norm is None:
        return None
    weight = _vector(name, size, order=order) if norm.has_weight else None
    return NormSource(norm, weight, Source((f"{name}.bias",), ((size,),), order=order) if norm.has_bias else None)


def _norms(norm: Norm, name: str, count: int, size: int, order: tuple[int, ...] | None) -> NormSource:
    """Several norms with weights of their own: a tensor for each, or one of all."""

    def source(kind: str) -> Source:
        if "{}" not in name:
            return Source((f"{name}.{kind}",), ((count, size),), order=order, axis=1)
        names = tuple(f"{name.format(i)}.{kind}" for i in range(count))
        return Source(names, ((size,),) * count, order=order, axis=1, num_stacked=count)

    return NormSource(norm, source("weight") if norm.has_weight else None, source("bias") if norm.has_bias else None)


def _with(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(prefix + name for name in names)


@cache
def rope_order(num_heads: int, dim: int, rope: RopeConfig | None) -> tuple[int, ...] | None:
    """The order of heads' outputs that puts the first of all pairs before the second ones, if another one is stored."""
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
def _turned_ends(num_heads: int, num_before: int, rope: RopeConfig) -> tuple[int, ...] | None:
    """As `rope_order`, for heads whose last numbers rotate."""
    end = rope_order(1, rope.dim, rope)
    if end is None:
        return None
    of_head = (*range(num_before), *(num_before + i for i in end))
    return tuple(head * len(of_head) + i for head in range(num_heads) for i in of_head)


@cache
def _stored_heads(
    num_heads: int, num_kv_heads: int, dim: int, rope: RopeConfig | None, by_head: bool
) -> tuple[int, ...] | None:
    """The order that puts all q heads first, then all k heads, then all v heads, with pairs half a head apart."""
    turned = rope_order(num_heads + num_kv_heads, dim, rope)
    num_all = num_heads + 2 * num_kv_heads
    if turned is not None:
        turned = (*turned, *range(len(turned), num_all * dim))
    if not by_head:
        return turned
    if num_heads != num_kv_heads:
        raise ValueError(f"{num_heads} and {num_kv_heads} heads are not stored head by head")
    stored = [(head * 3 + part) * dim + i for part in range(3) for head in range(num_heads) for i in range(dim)]
    return tuple(stored) if turned is None else tuple(stored[i] for i in turned)


@cache
def _alternating(size: int) -> tuple[int, ...]:
    """The order that puts all gates before all ups, if they alternate."""
    return (*range(0, 2 * size, 2), *range(1, 2 * size, 2))
