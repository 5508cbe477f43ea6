"""Where a rank's weights are: the whole model's sources, cut."""

from penstock.config.ranks import Place
from penstock.models.description.decoder import Attention, Decoder, DenseMLP, Experts, LatentAttention, Layer
from penstock.models.parsing.family import Shape
from penstock.models.shards.cuts import columns, inputs_of, items_of, norm_part, outputs_of, rows
from penstock.models.shards.ranges import times
from penstock.models.shards.shard import heads_of, inner_of
from penstock.models.shards.units import Units, units_of
from penstock.models.weights.decoder import (
    AttentionSources,
    DecoderSources,
    ExpertsSources,
    LatentSources,
    LayerSources,
    LayerTableSources,
    MLPSources,
    decoder_sources,
    stored_tensors,
)
from penstock.models.weights.sources import LinearSource, Ranges


def sources_of(decoder: Decoder) -> DecoderSources:
    """Return where each weight of a rank, or of a whole model, is."""
    shard = decoder.shard
    if shard is None:
        return decoder_sources(decoder)
    whole, sources, place = shard.whole, decoder_sources(shard.whole), shard.place
    head, embedding, final_norm = sources.head, sources.embedding, sources.final_norm
    assert embedding is not None
    embedding = outputs_of(embedding, (shard.vocab,)) if place.num_tensor > 1 else embedding
    if head is not None and place.num_tensor > 1:
        head = columns(head, (shard.vocab,))
    if head is None and not decoder.has_embedding:
        head = LinearSource(embedding)  # tied: the first stage has it, too
    return DecoderSources(
        embedding=embedding if decoder.has_embedding else None,
        positions=sources.positions if decoder.positions is not None else None,
        layer_inputs=_table(sources.layer_inputs, decoder),
        layers=tuple(
            _layer(whole.layers[number], sources.layers[number], units_of(whole, number), place)
            for number in range(*shard.layers)
        ),
        final_norm=final_norm if decoder.has_head else None,
        head=head if decoder.has_head else None,
    )


def own_tensors(decoder: Decoder) -> dict[str, Shape]:
    """Return the tensors from which a rank reads, with their full shapes."""
    return stored_tensors(sources_of(decoder))


def _table(sources: LayerTableSources | None, decoder: Decoder) -> LayerTableSources | None:
    shard, inputs = decoder.shard, decoder.layer_inputs
    if sources is None or shard is None or inputs is None:
        return sources
    table, projection = sources.table, sources.projection
    if shard.place.num_tensor > 1:
        table = outputs_of(table, (shard.layer_vocab,))
    if shard.place.num_stages > 1:
        of_layers = times((shard.layers,), inputs.size)
        table, projection = inputs_of(table, of_layers), columns(projection, of_layers)
    return LayerTableSources(table, projection, sources.norm)


def _layer(layer: Layer, sources: LayerSources, units: Units, place: Place) -> LayerSources:
    if place.num_tensor == 1:
        return sources
    beside = None
    if sources.beside_mlp is not None and layer.beside_mlp is not None:
        beside = sources.beside_mlp._replace(
            experts=_experts(layer.beside_mlp.experts, sources.beside_mlp.experts, units, place)
        )
    return sources._replace(
        mixer=None if layer.attention is None else _mixer(layer.attention, sources.mixer, place),
        mlp=None if layer.mlp is None else _mlp_or_experts(layer.mlp, sources.mlp, units, place),
        beside_mlp=beside,
    )


def _mixer(
    mixer: Attention | LatentAttention, sources: AttentionSources | LatentSources | None, place: Place
) -> AttentionSources | LatentSources:
    if isinstance(mixer, LatentAttention):
        assert isinstance(sources, LatentSources)
        return _latent_attention(mixer, sources, place)
    assert isinstance(sources, AttentionSources)
    return _attention(mixer, sources, place)


def _attention(mixer: Attention, sources: AttentionSources, place: Place) -> AttentionSources:
    dim, (q, kv) = mixer.head_dim, heads_of(mixer, place)
    q_size, kv_size = mixer.num_heads * dim, mixer.num_kv_heads * dim
    of_q, of_k = times((q,), dim), times((kv,), dim, q_size)
    chosen = of_q if mixer.shares_kv_of is not None else of_q + of_k + times((kv,), dim, q_size + kv_size)
    return AttentionSources(
        qkv=columns(sources.qkv, chosen),
        o=rows(sources.o, of_q, has_bias=place.tensor == 0),
        q_norm=sources.q_norm if mixer.norms_span == "head" else norm_part(sources.q_norm, (q,), dim),
        k_norm=sources.k_norm if mixer.norms_span == "head" else norm_part(sources.k_norm, (kv,), dim),
        sinks=None if sources.sinks is None else outputs_of(sources.sinks, (q,)),
    )


def _latent_attention(mixer: LatentAttention, sources: LatentSources, place: Place) -> LatentSources:
    heads, _ = heads_of(mixer, place)
    # Two sources have a matrix for each head; one source has the rows of all heads.
    kv_size = 1 if len(sources.kv_b) > 1 else mixer.nope_dim + mixer.v_dim
    return sources._replace(
        q=columns(sources.q, times((heads,), mixer.nope_dim + mixer.rope_dim)),
        kv_b=tuple(outputs_of(source, times((heads,), kv_size)) for source in sources.kv_b),
        o=rows(sources.o, times((heads,), mixer.v_dim), has_bias=place.tensor == 0),
    )


def _mlp_or_experts(
    mlp: DenseMLP | Experts, sources: MLPSources | ExpertsSources | None, units: Units, place: Place
) -> MLPSources | ExpertsSources:
    if isinstance(mlp, Experts):
        assert isinstance(sources, ExpertsSources)
        return _experts(mlp, sources, units, place)
    assert isinstance(sources, MLPSources)
    return _mlp(mlp, sources, units.mlp, place)


def _mlp(mlp: DenseMLP, sources: MLPSources, unit: int, place: Place) -> MLPSources:
    begin, end = inner_of(mlp.size, unit, place)
    of_each = [(first + begin, first + end) for first in range(0, mlp.size * (1 + mlp.is_gated), mlp.size)]
    return MLPSources(
        columns(sources.gate_up, tuple(of_each)), rows(sources.down, ((begin, end),), has_bias=place.tensor == 0)
    )


def _experts(experts: Experts, sources: ExpertsSources, units: Units, place: Place) -> ExpertsSources:
    shared = sources.shared
    if shared is not None and experts.shared is not None:
        shared = _mlp(experts.shared, shared, units.shared, place)
    if experts.spread is not None:
        held = experts.spread.held_by(place.tensor)
        return sources._replace(gate_up=_items(sources.gate_up, held), down=_items(sources.down, held), shared=shared)
    size = experts.size
    begin, end = inner_of(size, units.experts, place)
    return sources._replace(
        gate_up=columns(
            sources.gate_up,
            tuple((first + begin, first + end) for first in range(0, size * (1 + experts.is_gated), size)),
        ),
        down=rows(sources.down, ((begin, end),), has_bias=place.tensor == 0),
        shared=shared,
    )


def _items(linear: LinearSource, held: Ranges) -> LinearSource:
    """Return the weights of these experts with their biases, because each expert is computed in one place."""
    return LinearSource(items_of(linear.weight, held), None if linear.bias is None else items_of(linear.bias, held))
