"""From a checkpoint to a described decoder."""

from collections.abc import Iterator

import structlog
import torch

from penstock.core.checkpoint.decoder import Attention, Decoder, DenseMLP, Experts, LatentAttention, Layer
from penstock.core.checkpoint.weights import (
    AttentionSources,
    ExpertsSources,
    LatentSources,
    LayerSources,
    MLPSources,
    NormSource,
    decoder_sources,
)
from penstock.gpu_worker.models.blocks.attention import AttentionBlock
from penstock.gpu_worker.models.blocks.experts import ExpertsBlock
from penstock.gpu_worker.models.blocks.latent_attention import LatentAttentionBlock
from penstock.gpu_worker.models.blocks.mlp import MLPBlock
from penstock.gpu_worker.models.decoder import DecoderLayer, DecoderModel, DecoderWeights
from penstock.gpu_worker.models.model import Model
from penstock.gpu_worker.models.native_decoder import NativeDecoderModel
from penstock.gpu_worker.models.native_program import lacking
from penstock.gpu_worker.models.weights import WeightReader
from penstock.kernels.norms import NormWeights
from penstock.kernels.qk_norm_rope_write import QKNorms

log = structlog.get_logger()


def build(config: Decoder, reader: WeightReader) -> Model:
    """As `Family.build`."""
    library = reader.library
    lacks = lacking(config)
    if library is not None and lacks is not None:
        log.info("torch's kernels compute this model: the native ones lack an operation", operation=lacks)
    if library is None or lacks is not None:
        return DecoderModel(config, read_weights(config, reader._replace(library=None)))
    computes_in_bf16 = reader.dtype == torch.bfloat16
    # Of other blocks, torch would want weights that are packed here.
    is_plain = all(isinstance(layer.mixer, Attention) and isinstance(layer.mlp, DenseMLP) for layer in config.layers)
    packed = reader._replace(dtype=torch.bfloat16 if reader.is_bf16 else reader.dtype, are_packed=True)
    return NativeDecoderModel(
        config,
        read_weights(config, packed),
        library,
        rounds_inputs=computes_in_bf16 and library.multiplies_bf16,
        long_on_torch=computes_in_bf16 and library.leaves_long_steps and is_plain,
    )


def read_weights(config: Decoder, reader: WeightReader) -> DecoderWeights:
    """The blocks, with their weights; those of layers are read when they are iterated."""
    sources = decoder_sources(config)

    def layers() -> Iterator[DecoderLayer]:
        for layer, its in zip(config.layers, sources.layers, strict=True):
            yield _layer(layer, its, reader)

    return DecoderWeights(
        embedding=reader.embedding(sources.embedding, is_head=sources.head is None),
        positions=None if sources.positions is None else reader.tensor(sources.positions),
        layers=layers(),
        final_norm=_norm(sources.final_norm, reader),
        head=None if sources.head is None else reader.linear(sources.head),
    )


def _layer(layer: Layer, sources: LayerSources, reader: WeightReader) -> DecoderLayer:
    return DecoderLayer(
        mixer_norm=_norm(sources.mixer_norm, reader),
        mixer=_mixer(layer.mixer, sources.mixer, reader),
        post_mixer_norm=_norm(sources.post_mixer_norm, reader),
        mlp_norm=_norm(sources.mlp_norm, reader),
        mlp=_mlp(layer.mlp, sources.mlp, reader),
        post_mlp_norm=_norm(sources.post_mlp_norm, reader),
        is_parallel=layer.is_parallel,
        residual_scale=layer.residual_scale,
    )


def _mixer(
    mixer: Attention | LatentAttention, sources: AttentionSources | LatentSources, reader: WeightReader
) -> AttentionBlock | LatentAttentionBlock:
    if isinstance(mixer, LatentAttention):
        assert isinstance(sources, LatentSources)
        return _latent_attention(mixer, sources, reader)
    assert isinstance(sources, AttentionSources)
    return _attention(mixer, sources, reader)


def _latent_attention(mixer: LatentAttention, sources: LatentSources, reader: WeightReader) -> LatentAttentionBlock:
    kv_a_norm = _norm(sources.kv_a_norm, reader)
    assert kv_a_norm is not None
    return LatentAttentionBlock(
        mixer,
        q_a=None if sources.q_a is None else reader.linear(sources.q_a),
        q_a_norm=_norm(sources.q_a_norm, reader),
        q=reader.linear(sources.q),
        kv_a=reader.linear(sources.kv_a),
        kv_a_norm=kv_a_norm,
        kv_b=reader.tensor(sources.kv_b).view(mixer.num_heads, -1, mixer.kv_rank),
        o=reader.linear(sources.o),
    )


def _attention(attention: Attention, sources: AttentionSources, reader: WeightReader) -> AttentionBlock:
    return AttentionBlock(
        attention,
        qkv=reader.linear(sources.qkv),
        o=reader.linear(sources.o),
        norms=QKNorms(
            _norm(sources.q_norm, reader),
            _norm(sources.k_norm, reader),
            spans_all=attention.norms_span == "all",
            follow_rope=attention.norms_follow_rope,
        ),
        sinks=None if sources.sinks is None else reader.tensor(sources.sinks, torch.float32),
    )


def _mlp(
    mlp: DenseMLP | Experts, sources: MLPSources | ExpertsSources, reader: WeightReader
) -> MLPBlock | ExpertsBlock:
    if isinstance(mlp, DenseMLP):
        assert isinstance(sources, MLPSources)
        return MLPBlock(mlp, reader.linear(sources.gate_up), reader.linear(sources.down))
    assert isinstance(sources, ExpertsSources)
    shared = None if mlp.shared is None or sources.shared is None else _mlp(mlp.shared, sources.shared, reader)
    assert not isinstance(shared, ExpertsBlock)
    return ExpertsBlock(
        mlp,
        router=reader._replace(dtype=torch.float32).linear(sources.router),
        correction=None if sources.correction is None else reader.tensor(sources.correction, torch.float32).flatten(),
        gate_up=reader.experts(sources.gate_up),
        down=reader.experts(sources.down),
        shared=shared,
        shared_gate=None if sources.shared_gate is None else reader.linear(sources.shared_gate),
    )


def _norm(source: NormSource | None, reader: WeightReader) -> NormWeights | None:
    if source is None:
        return None
    norm = source.norm
    # Offset weights are kept in fp32: in bf16, 1 + w would lose what distinguishes w from 0.
    dtype = torch.float32 if norm.offset else None
    weight = None if source.weight is None else reader.tensor(source.weight, dtype)
    if weight is not None and norm.offset:
        weight += norm.offset
    return NormWeights(weight, norm.eps, norm.kind, None if source.bias is None else reader.tensor(source.bias, dtype))
