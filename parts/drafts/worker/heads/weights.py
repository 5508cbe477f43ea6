"""The weights of heads, loaded for the kernels that compute the model."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config.options import ConfigError
from penstock.gpu_worker.models.decoder import DecoderModel
from penstock.gpu_worker.models.linear import Embedding, PlainEmbedding, PlainLinear
from penstock.gpu_worker.models.loading.decoder_build import read_weights
from penstock.gpu_worker.models.loading.norms import read_norm
from penstock.gpu_worker.models.loading.stored import StoredWeights, as_tensor
from penstock.gpu_worker.models.loading.weights import WeightReader
from penstock.gpu_worker.models.model import HandsOutLayers, Model
from penstock.gpu_worker.models.native_decoder import NativeDecoderModel
from penstock.gpu_worker.steps.ahead import Target
from penstock.kernels.norms import NormWeights
from penstock.models.check import ModelTensors
from penstock.models.weights.sources import LinearSource
from penstock.parts.drafts.checkpoints.head import TOKEN_OFFSETS, DraftHead, head_sources
from penstock.parts.drafts.worker.heads.matrix import Matrix, TokenMap


class HeadWeights(NamedTuple):
    """A head, loaded."""

    layers: Model
    norm: NormWeights | None
    output: Matrix | None  # None: the model's
    token_map: TokenMap | None  # the tokens of the outputs
    taps: Matrix | None  # multiplies the tapped inputs of layers of the model
    num_taps: int


def load_head(head: DraftHead, tensors: ModelTensors, target: Target) -> HeadWeights:
    """Read a head's weights; embedding and output matrix are the model's, unless the head has its own.

    Raises:
        ConfigError: the model's embedding cannot be shared.
    """
    reader = head_reader(tensors, target)
    config, sources = head.decoder, head_sources(head)
    weights = read_weights(config, reader)
    if not config.has_embedding:
        model = target.model
        if not isinstance(model, DecoderModel | NativeDecoderModel) or model.embedding is None:
            raise ConfigError("it needs the model's embedding, which the model does not hand out")
        weights = weights._replace(embedding=model.embedding)
    elif _are_alike(weights.embedding, getattr(target.model, "embedding", None)):
        weights = weights._replace(embedding=getattr(target.model, "embedding", None))
    rounds = target.dtype == torch.bfloat16
    layers: Model
    if reader.library is None:
        layers = DecoderModel(config, weights, dtype=target.dtype)
    else:
        layers = NativeDecoderModel(config, weights, reader.library, rounds_inputs=rounds)
    output, taps = (
        None if source is None else read_matrix(source, reader, target) for source in (sources.output, sources.taps)
    )
    if head.taps:
        if not isinstance(target.model, HandsOutLayers):
            raise ConfigError("it listens to layers of the model, which does not hand them out")
        target.model.tap(head.taps)
    token_map = _token_map(tensors, target) if head.has_token_map else None
    if head.num_picked is not None and token_map is not None:
        picked = PlainLinear(_output_rows(target, token_map.token_ids))
        output = Matrix(picked, reader.library, rounds_inputs=rounds)
    return HeadWeights(layers, read_norm(sources.norm, reader), output, token_map, taps, len(head.taps))


def _are_alike(first: Embedding | None, second: Embedding | None) -> bool:
    """Whether two embeddings hold the same weights, so that one of them is enough."""
    if not isinstance(first, PlainEmbedding) or not isinstance(second, PlainEmbedding):
        return False
    return first.weight.dtype == second.weight.dtype and torch.equal(first.weight, second.weight)


def _output_rows(target: Target, token_ids: Tensor) -> Tensor:
    """[N, H], rows of the model's output matrix. Its logits' scale and cap are left out: they keep the order."""
    model = target.model
    if isinstance(model, NativeDecoderModel):
        return model.output_rows(token_ids).to(target.dtype)
    if isinstance(model, DecoderModel) and isinstance(model.head, PlainLinear):
        return model.head.weight[token_ids]
    raise ConfigError("it computes some rows of the model's output matrix, which the model does not hand out")


def _token_map(tensors: ModelTensors, target: Target) -> TokenMap:
    offsets = as_tensor(tensors.stored[TOKEN_OFFSETS]).long()
    ids = (offsets + torch.arange(offsets.shape[0])).to(target.device.torch_device)
    return TokenMap(ids, target.model_config.vocab_size)


def read_matrix(source: LinearSource, reader: WeightReader, target: Target) -> Matrix:
    """Read one of a head's own matrices."""
    return Matrix(reader.linear(source), reader.library, rounds_inputs=target.dtype == torch.bfloat16)


def head_reader(tensors: ModelTensors, target: Target) -> WeightReader:
    """A reader of a head's tensors, for the kernels that compute the model."""
    library = target.device.library if isinstance(target.model, NativeDecoderModel) else None
    is_bf16 = all(tensor.dtype == "BF16" for tensor in tensors.stored.values() if tensor.dtype not in ("I64", "I32"))
    is_packed = library is not None
    weights = StoredWeights(tensors, {}, lambda: None)
    return WeightReader(
        weights.read,
        is_bf16,
        torch.bfloat16 if is_packed and is_bf16 else target.dtype,
        target.device.torch_device,
        library,
        are_packed=is_packed,
    )
