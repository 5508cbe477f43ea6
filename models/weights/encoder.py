"""Where an encoder's weights are in its checkpoint."""

from typing import NamedTuple

from penstock.models.description.encoder import Encoder
from penstock.models.parsing.family import Shape
from penstock.models.weights.decoder import stored_tensors
from penstock.models.weights.sources import LinearSource, NormSource, Source, linear, norm_of, prefixed, vector


class EncoderLayerSources(NamedTuple):
    """See `EncoderLayer`."""

    qkv: LinearSource
    o: LinearSource
    attention_norm: NormSource | None
    gate_up: LinearSource
    down: LinearSource
    mlp_norm: NormSource


class ClassHeadSources(NamedTuple):
    """See `ClassHead`."""

    dense: LinearSource | None
    norm: NormSource | None
    out: LinearSource


class EncoderSources(NamedTuple):
    """A whole encoder."""

    embedding: Source
    positions: Source | None
    types: Source | None
    embedding_norm: NormSource
    layers: tuple[EncoderLayerSources, ...]
    final_norm: NormSource | None
    head: ClassHeadSources | None


def encoder_sources(encoder: Encoder) -> EncoderSources:
    """Return the sources of all weights."""
    names, size, norm = encoder.names, encoder.hidden_size, encoder.norm

    def normed(name: str) -> NormSource:
        source = norm_of(norm, name, size)
        assert source is not None
        return source

    def layer(i: int) -> EncoderLayerSources:
        its, start = encoder.layers[i], names.base + names.layer.format(i)
        attention, mlp = its.attention, its.mlp
        inner = attention.num_heads * attention.head_dim
        widths = (mlp.size,) * (1 + mlp.is_gated)
        gate_up = prefixed(start, names.gate_up)
        return EncoderLayerSources(
            linear(prefixed(start, names.qkv), (inner,) * 3, size, attention.has_bias),
            linear((start + names.o,), (size,), inner, attention.has_bias),
            normed(start + names.attention_norm) if its.has_first_norm else None,
            linear(gate_up, widths, size, mlp.has_bias),
            linear((start + names.down,), (size,), mlp.size, mlp.has_bias),
            normed(start + names.mlp_norm),
        )

    positions, base = encoder.positions, names.base
    return EncoderSources(
        vector(base + names.embedding, encoder.vocab_size, size),
        None if positions is None else vector(base + names.positions, positions.count + positions.offset, size),
        vector(base + names.types, encoder.num_types, size) if encoder.num_types else None,
        normed(base + names.embedding_norm),
        tuple(layer(i) for i in range(encoder.num_layers)),
        normed(base + names.final_norm) if encoder.has_final_norm else None,
        _head_sources(encoder),
    )


def _head_sources(encoder: Encoder) -> ClassHeadSources | None:
    head, names, size = encoder.head, encoder.names, encoder.hidden_size
    if head is None:
        return None
    return ClassHeadSources(
        linear((names.head_dense,), (size,), size, head.dense_bias) if head.has_dense else None,
        norm_of(head.norm, names.head_norm, size),
        linear((names.head_out,), (encoder.num_classes,), size, head.has_bias),
    )


def encoder_tensors(encoder: Encoder) -> dict[str, Shape]:
    """Return every tensor that the checkpoint must have, with its shape."""
    return stored_tensors(encoder_sources(encoder))
