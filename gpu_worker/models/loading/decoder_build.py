"""From a checkpoint to a described decoder."""

from collections.abc import Iterable, Iterator

import structlog
import torch
from torch import Tensor

from penstock.config.options import ConfigError
from penstock.gpu_worker.models.blocks.attention import AttentionBlock
from penstock.gpu_worker.models.blocks.entry import EntryBlock
from penstock.gpu_worker.models.blocks.experts import BesideBlock, ExpertsBlock
from penstock.gpu_worker.models.blocks.latent_attention import IndexerBlock, LatentAttentionBlock
from penstock.gpu_worker.models.blocks.layer_inputs import LayerInputBlock, LayerInputsBlock
from penstock.gpu_worker.models.blocks.mlp import MLPBlock
from penstock.gpu_worker.models.blocks.norms_over_ranks import NormsOverRanks
from penstock.gpu_worker.models.blocks.recurrent import RecurrentBlock, SideBySideBlock
from penstock.gpu_worker.models.blocks.travelling_experts import TravellingExperts
from penstock.gpu_worker.models.decoder import DecoderLayer, DecoderModel, DecoderWeights
from penstock.gpu_worker.models.linear import Embedding, Linear
from penstock.gpu_worker.models.loading.norms import read_norm
from penstock.gpu_worker.models.loading.recurrent_build import recurrent
from penstock.gpu_worker.models.loading.weights import WeightReader
from penstock.gpu_worker.models.model import Model
from penstock.gpu_worker.models.native_decoder import NativeDecoderModel
from penstock.gpu_worker.models.native_program import lacking
from penstock.gpu_worker.models.vocabulary import GatheredHead, SharedEmbedding, VocabularyPart, vocabulary_part
from penstock.kernels.attention.qk_norm_rope_write import QKNorms
from penstock.kernels.experts.held_experts import HeldExperts, held_experts
from penstock.kernels.norms import NormWeights
from penstock.models.description.decoder import (
    Attention,
    BesideMLP,
    Decoder,
    DenseMLP,
    Entry,
    Experts,
    LatentAttention,
    Layer,
    LayerInputs,
    Shard,
    SideBySide,
)
from penstock.models.files.source import LoadError
from penstock.models.shards.sources import sources_of
from penstock.models.vision.foreign import ForeignVision
from penstock.models.weights.decoder import (
    AttentionSources,
    BesideSources,
    DecoderSources,
    EntrySources,
    ExpertsSources,
    IndexerSources,
    LatentSources,
    LayerInputSources,
    LayerSources,
    LayerTableSources,
    MLPSources,
)
from penstock.models.weights.sources import LinearSource, Source

log = structlog.get_logger()


def build(config: Decoder, reader: WeightReader) -> Model:
    """As `Family.build`."""
    model = _decoder(config, reader)
    if isinstance(config.vision, ForeignVision) and reader.checkpoint is None:
        log.warning("images refused", reason="--load-format dummy makes no weights for what transformers computes")
    elif config.vision is not None and reader.ranks.place.num_stages == 1:  # each rank has the whole tower
        from penstock.gpu_worker.models.loading.vision import read_tower  # most models take texts only

        try:
            model.tower = read_tower(config.vision, reader._replace(adapters=None))
        except LoadError as error:
            if not isinstance(config.vision, ForeignVision):
                raise
            log.warning("images refused", reason=str(error))  # texts need no tower, and may be all that is wanted
    elif config.vision is not None:
        log.warning("images refused", reason="a model in stages takes texts only")
    return model


def _decoder(config: Decoder, reader: WeightReader) -> DecoderModel | NativeDecoderModel:
    library = reader.library
    lacks = lacking(config)
    if library is not None and lacks is not None:
        log.info("native CPU kernels not used", lacks=lacks)
    if library is None or lacks is not None:
        weights = read_weights(config, reader._replace(library=None))
        return DecoderModel(config, weights, ranks=reader.ranks, dtype=reader.dtype)
    packed = reader._replace(dtype=torch.bfloat16 if reader.is_bf16 else reader.dtype, are_packed=True)
    return NativeDecoderModel(
        config,
        read_weights(config, packed),
        library,
        ranks=reader.ranks,
        rounds_inputs=reader.dtype == torch.bfloat16,
    )


def read_weights(config: Decoder, reader: WeightReader) -> DecoderWeights:
    """The blocks with their weights. A layer's weights are read when the layers are iterated."""
    sources = sources_of(config)
    of_layers, reader = reader, reader._replace(adapters=None)

    def layers() -> Iterator[DecoderLayer]:
        for layer, its in zip(config.layers, sources.layers, strict=True):
            yield _layer(layer, config.layer_inputs, its, of_layers)

    held: dict[int, HeldExperts] = {}
    return DecoderWeights(
        embedding=_embedding(sources, config, reader),
        positions=None if sources.positions is None else reader.tensor(sources.positions),
        entry=_entry(config.entry, sources.entry, reader),
        layer_inputs=_layer_inputs(config.layer_inputs, sources.layer_inputs, config.shard, reader),
        layers=_noting(layers(), config, held),
        final_norm=read_norm(sources.final_norm, reader),
        head=None if sources.head is None else _head(sources.head, config, reader),
        held_experts=held,
    )


def _entry(entry: Entry | None, sources: EntrySources | None, reader: WeightReader) -> EntryBlock | None:
    if entry is None or sources is None:
        return None
    norms = read_norm(sources.embedding_norm, reader), read_norm(sources.given_norm, reader)
    return EntryBlock(entry, *norms, None if sources.projection is None else reader.linear(sources.projection))


def _embedding(sources: DecoderSources, config: Decoder, reader: WeightReader) -> Embedding | None:
    if sources.embedding is None:
        return None
    rows = reader.embedding(sources.embedding, is_head=sources.head is None and config.has_head)
    part = vocabulary_part(config, reader.ranks)
    return rows if part is None else SharedEmbedding(rows, part)


def _head(source: LinearSource, config: Decoder, reader: WeightReader) -> Linear:
    linear, part = reader.linear(source), vocabulary_part(config, reader.ranks)
    return linear if part is None else GatheredHead(linear, part)


def _layer(layer: Layer, inputs: LayerInputs | None, sources: LayerSources, reader: WeightReader) -> DecoderLayer:
    return DecoderLayer(
        mixer_norm=read_norm(sources.mixer_norm, reader),
        mixer=_mixer(layer, sources, reader),
        post_mixer_norm=read_norm(sources.post_mixer_norm, reader),
        mlp_norm=read_norm(sources.mlp_norm, reader),
        mlp=None if layer.mlp is None else _travelling(_mlp(layer.mlp, sources.mlp, reader), reader),
        post_mlp_norm=read_norm(sources.post_mlp_norm, reader),
        is_parallel=layer.is_parallel,
        residual_scale=layer.residual_scale,
        beside_mlp=_beside_mlp(layer.beside_mlp, sources.beside_mlp, reader),
        input=_layer_input(inputs, sources.layer_input, reader),
        output_scale=None if sources.output_scale is None else float(reader.tensor(sources.output_scale)),
    )


def _mixer(
    layer: Layer, sources: LayerSources, reader: WeightReader
) -> AttentionBlock | LatentAttentionBlock | RecurrentBlock | SideBySideBlock | None:
    attention = None
    if isinstance(layer.attention, LatentAttention):
        assert isinstance(sources.mixer, LatentSources)
        return _latent_attention(layer.attention, sources.mixer, reader)
    if layer.attention is not None:
        assert isinstance(sources.mixer, AttentionSources)
        attention = _attention(layer.attention, sources.mixer, reader)
    if layer.recurrent is None or sources.recurrent is None:
        return attention
    block = recurrent(layer.recurrent, sources.recurrent, reader)
    if isinstance(layer.mixer, SideBySide) and attention is not None:
        return SideBySideBlock(layer.mixer, attention, block)
    return block


def _latent_attention(mixer: LatentAttention, sources: LatentSources, reader: WeightReader) -> LatentAttentionBlock:
    kv_a_norm = read_norm(sources.kv_a_norm, reader)
    assert kv_a_norm is not None
    return LatentAttentionBlock(
        mixer,
        q_a=None if sources.q_a is None else reader.linear(sources.q_a),
        q_a_norm=read_norm(sources.q_a_norm, reader),
        q=reader.linear(sources.q),
        kv_a=reader.linear(sources.kv_a),
        kv_a_norm=kv_a_norm,
        kv_b=from_latent(mixer, sources.kv_b, reader),
        o=reader.linear(sources.o),
        indexer=None if sources.indexer is None else _indexer(sources.indexer, reader),
    )


def _indexer(sources: IndexerSources, reader: WeightReader) -> IndexerBlock:
    return IndexerBlock(
        q=reader.linear(sources.q),
        k=reader.linear(sources.k),
        k_norm=_given(read_norm(sources.k_norm, reader)),
        weights=reader._replace(dtype=torch.float32).plain_linear(sources.weights),
    )


def from_latent(mixer: LatentAttention, sources: tuple[Source, ...], reader: WeightReader) -> Tensor:
    """[heads, key and value, latent]."""
    if len(sources) == 1:
        return reader.tensor(sources[0]).view(mixer.num_heads, -1, mixer.kv_rank)
    keys, values = (reader.tensor(source) for source in sources)
    return torch.cat((keys.transpose(1, 2), values), dim=1)


def _attention(attention: Attention, sources: AttentionSources, reader: WeightReader) -> AttentionBlock:
    q_norm, k_norm = read_norm(sources.q_norm, reader), read_norm(sources.k_norm, reader)
    over_ranks, num_tensor = None, reader.ranks.place.num_tensor
    if q_norm is not None and attention.norms_span == "all" and num_tensor > 1:
        num_q = num_tensor * attention.num_heads * attention.head_dim
        num_k = num_tensor * attention.num_kv_heads * attention.head_dim
        over_ranks = NormsOverRanks(q_norm, k_norm, num_q, num_k, reader.ranks)
        q_norm = k_norm = None
    return AttentionBlock(
        attention,
        qkv=reader.linear(sources.qkv),
        o=reader.linear(sources.o),
        norms=QKNorms(
            q_norm,
            k_norm,
            spans_all=attention.norms_span == "all",
            follow_rope=attention.norms_follow_rope,
            v=None if attention.v_norm_eps is None else NormWeights(eps=attention.v_norm_eps),
        ),
        sinks=None if sources.sinks is None else reader.tensor(sources.sinks, torch.float32),
        kv_scales=reader.kv_scales(sources.o.weight.names[0].rpartition(".")[0].rpartition(".")[0]),
        norms_over_ranks=over_ranks,
    )


def _mlp(
    mlp: DenseMLP | Experts, sources: MLPSources | ExpertsSources | None, reader: WeightReader
) -> MLPBlock | ExpertsBlock:
    if isinstance(mlp, DenseMLP):
        assert isinstance(sources, MLPSources)
        return MLPBlock(mlp, reader.linear(sources.gate_up), reader.linear(sources.down))
    assert isinstance(sources, ExpertsSources)
    shared = None if mlp.shared is None or sources.shared is None else _mlp(mlp.shared, sources.shared, reader)
    assert not isinstance(shared, ExpertsBlock)
    return ExpertsBlock(
        mlp,
        router=reader._replace(dtype=torch.float32).plain_linear(sources.router),
        correction=_floats(sources.correction, reader),
        gate_up=reader.experts(sources.gate_up),
        down=reader.experts(sources.down),
        shared=shared,
        shared_gate=None if sources.shared_gate is None else reader.plain_linear(sources.shared_gate),
        expert_scales=_floats(sources.expert_scales, reader),
        held=None
        if mlp.spread is None
        else held_experts(reader.ranks.place.tensor, mlp.spread.ranks_of, reader.device),
    )


def _travelling(block: MLPBlock | ExpertsBlock, reader: WeightReader) -> MLPBlock | ExpertsBlock | TravellingExperts:
    """The block, wrapped if the tokens of long steps travel from rank to rank."""
    spread = block.experts.spread if isinstance(block, ExpertsBlock) else None
    if not isinstance(block, ExpertsBlock) or block.held is None or spread is None or spread.fewest_travelling is None:
        return block
    if reader.library is None:
        return TravellingExperts(block, block.held, reader.ranks, spread.fewest_travelling)
    if spread.fewest_travelling == 0:
        raise ConfigError(
            "expert_exchange all-to-all: with the native CPU kernels all ranks have all tokens in the memory that "
            "they share; leave the option out, or add --cpu-kernels torch"
        )
    return block


def _noting(layers: Iterable[DecoderLayer], config: Decoder, held: dict[int, HeldExperts]) -> Iterator[DecoderLayer]:
    """Pass the layers on, and note in `held` the experts that each holds, by the layer's number in the checkpoint."""
    for number, layer in enumerate(layers, 0 if config.shard is None else config.shard.layers[0]):
        mlp = layer.mlp if layer.beside_mlp is None else layer.beside_mlp.experts
        if isinstance(mlp, ExpertsBlock | TravellingExperts) and mlp.held is not None:
            held[number] = mlp.held
        yield layer


def _beside_mlp(beside: BesideMLP | None, sources: BesideSources | None, reader: WeightReader) -> BesideBlock | None:
    if beside is None or sources is None:
        return None
    experts = _mlp(beside.experts, sources.experts, reader)
    scale = _floats(sources.experts.router_scale, reader)
    norm, post, mlp_post = (_given(read_norm(each, reader)) for each in (sources.norm, sources.post, sources.mlp_post))
    assert isinstance(experts, ExpertsBlock)
    assert scale is not None
    router_norm = NormWeights(scale * len(scale) ** -0.5, beside.norm.eps)
    return BesideBlock(experts, router_norm, norm, post, mlp_post, reader.ranks)


def _layer_input(
    inputs: LayerInputs | None, sources: LayerInputSources | None, reader: WeightReader
) -> LayerInputBlock | None:
    if inputs is None or sources is None:
        return None
    down, up = reader.linear(sources.down), reader.linear(sources.up)
    return LayerInputBlock(inputs, down, up, _given(read_norm(sources.norm, reader)))


def _layer_inputs(
    inputs: LayerInputs | None, sources: LayerTableSources | None, shard: Shard | None, reader: WeightReader
) -> LayerInputsBlock | None:
    if inputs is None or sources is None:
        return None
    table, projection = reader.embedding(sources.table, is_head=False), reader.linear(sources.projection)
    if shard is not None and shard.place.num_tensor > 1:
        table = SharedEmbedding(table, VocabularyPart(shard.layer_vocab, inputs.vocab_size, reader.ranks))
    return LayerInputsBlock(inputs, table, projection, _given(read_norm(sources.norm, reader)))


def _floats(source: Source | None, reader: WeightReader) -> Tensor | None:
    return None if source is None else reader.tensor(source, torch.float32).flatten()


def _given(norm: NormWeights | None) -> NormWeights:
    assert norm is not None
    return norm
