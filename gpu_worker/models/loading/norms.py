"""From a checkpoint to norms."""

import torch

from penstock.gpu_worker.models.loading.weights import WeightReader
from penstock.kernels.norms import NormWeights
from penstock.models.weights.sources import NormSource


def read_norm(source: NormSource | None, reader: WeightReader) -> NormWeights | None:
    """A norm's weights."""
    if source is None:
        return None
    norm = source.norm
    # Offset weights are kept in fp32: in bf16, 1 + w would lose most of the bits of a small w.
    dtype = torch.float32 if norm.offset else None
    weight = None if source.weight is None else reader.tensor(source.weight, dtype)
    if weight is not None and norm.offset:
        weight += norm.offset
    return NormWeights(weight, norm.eps, norm.kind, None if source.bias is None else reader.tensor(source.bias, dtype))
