"""The norms of the families, with random weights."""

import torch

from penstock.kernels.norms import NormWeights

NORMS = ("llama", "gemma", "bare", "layer", "layer without bias", "bare layer", "fp32 layer")


def norm_weights(kind: str, width: int, dtype: torch.dtype, device: str = "cpu") -> NormWeights:
    """Weights for one of `NORMS`, around 1."""
    held = torch.float32 if kind in ("gemma", "fp32 layer") else dtype
    weight, bias = (1 + torch.randn(2, width, device=device) / 2).to(held)
    if kind == "bare":
        return NormWeights(None, 1e-5)
    if "layer" not in kind:
        return NormWeights(weight, 1e-5)
    if kind == "bare layer":
        return NormWeights(None, 1e-5, "layer")
    return NormWeights(weight, 1e-5, "layer", None if kind == "layer without bias" else bias)
