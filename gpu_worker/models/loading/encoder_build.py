"""From a checkpoint to a described encoder."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.gpu_worker.models.encoder import ClassHeadBlock, EncoderBlock, EncoderModel, EncoderWeights
from penstock.gpu_worker.models.linear import Linear
from penstock.gpu_worker.models.loading.norms import read_norm
from penstock.gpu_worker.models.loading.weights import WeightReader
from penstock.gpu_worker.models.model import ForwardInputs, Model
from penstock.kernels.activation import Activation
from penstock.kernels.native.attention.ragged import WIDTH, activate
from penstock.kernels.native.library import Library, PackedLinear
from penstock.kernels.norms import NormWeights
from penstock.models.description.encoder import Encoder
from penstock.models.weights.encoder import ClassHeadSources, EncoderLayerSources, encoder_sources
from penstock.models.weights.sources import LinearSource, NormSource


class NativeLinear(NamedTuple):
    """A product on the native CPU kernels. Activations are fp32, whatever the weights are."""

    packed: PackedLinear
    library: Library

    def __call__(self, x: Tensor, step: ForwardInputs | None) -> Tensor:
        return self.library.linear(self.packed, x)

    def of_activation(self, x: Tensor, activation: Activation, step: ForwardInputs) -> Tensor:
        width = x.shape[1] // (1 + activation.is_gated)
        return self(activation(x) if width % WIDTH else activate(self.library, x, activation), step)

    def pack(self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False) -> PackedLinear:
        return self.packed


def build(config: Encoder, reader: WeightReader) -> Model:
    """As `Family.build`."""
    library = reader.library
    kernels = "triton" if reader.device.type == "cuda" else "torch" if library is None else "native"
    # On the native kernels activations are fp32; with --dtype bfloat16 products round their inputs, as for decoders.
    activations = reader if library is None else reader._replace(dtype=torch.float32)
    sources = encoder_sources(config)

    def linear(source: LinearSource) -> Linear:
        if library is None:
            return reader.linear(source)
        dtype = torch.bfloat16 if reader.is_bf16 else reader.dtype
        bias = None if source.bias is None else activations.tensor(source.bias)
        weight = reader.tensor(source.weight, dtype)
        return NativeLinear(library.pack(weight, bias, rounds_inputs=reader.dtype == torch.bfloat16), library)

    def layer(its: EncoderLayerSources) -> EncoderBlock:
        return EncoderBlock(
            linear(its.qkv),
            linear(its.o),
            read_norm(its.attention_norm, activations),
            linear(its.gate_up),
            linear(its.down),
            _given(its.mlp_norm, activations),
        )

    def head(its: ClassHeadSources | None) -> ClassHeadBlock | None:
        if its is None or config.head is None:
            return None
        dense = None if its.dense is None else activations.plain_linear(its.dense)
        return ClassHeadBlock(config.head, dense, read_norm(its.norm, activations), activations.plain_linear(its.out))

    weights = EncoderWeights(
        activations.tensor(sources.embedding),
        None if sources.positions is None else activations.tensor(sources.positions),
        None if sources.types is None else activations.tensor(sources.types),
        _given(sources.embedding_norm, activations),
        tuple(map(layer, sources.layers)),
        read_norm(sources.final_norm, activations),
        head(sources.head),
    )
    return EncoderModel(config, weights, kernels, library)


def _given(source: NormSource, reader: WeightReader) -> NormWeights:
    norm = read_norm(source, reader)
    assert norm is not None
    return norm
