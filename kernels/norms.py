"""Norms over the last dimension, alone and fused with the addition to the residual stream before them.

RMSNorm is Zhang and Sennrich's (2019), LayerNorm Ba, Kiros and Hinton's (2016).
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class NormWeights(NamedTuple):
    """A norm with its weights (H: the width that it spans).

    Norms are computed in fp32. If an RMSNorm's weight has the dtype of x, the result is rounded to this dtype before it
    is multiplied by the weight, as in Llama. If the weight is fp32, it is rounded once at the end, as in Gemma.
    LayerNorm rounds once at the end.
    """

    weight: Tensor | None = None  # [H], in the dtype of x or in fp32; None: ones
    eps: float = 1e-6  # added to the mean square, or to the variance
    kind: Literal["rms", "layer"] = "rms"
    bias: Tensor | None = None  # [H], in the dtype of the weight


def norm(x: Tensor, weights: NormWeights) -> Tensor:
    """Scale each last-dimension vector of `x` to unit root mean square (or variance), then by the weight.

    Args:
        x: [..., H].
        weights: of the norm.

    Returns:
        [..., H], a new tensor in the dtype of `x`.
    """
    _check(x, weights)
    if x.is_cuda:
        from penstock.kernels.triton.norms import norm_triton

        return norm_triton(x, weights)
    return norm_cpu(x, weights)


def add_norm(
    x: Tensor, residual: Tensor, weights: NormWeights | None, scale: float = 1.0, post: NormWeights | None = None
) -> tuple[Tensor, Tensor]:
    """`residual += scale * post(x)`, then the norm of the sum.

    Args:
        x: [T, H], what a block computed.
        residual: [T, H], the residual stream; updated in place.
        weights: of the norm of the sum; None for no norm.
        scale: multiplies what is added.
        post: of a norm of `x` itself; None for no norm.

    Returns:
        (normed [T, H], residual [T, H]): the second is the updated `residual` itself. Without `weights`, the first is
        `residual`, too.
    """
    for each in (weights, post):
        if each is not None:
            _check(x, each)
    if x.shape != residual.shape:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} differ in shape")
    if x.is_cuda:
        from penstock.kernels.triton.norms import add_norm_triton

        return add_norm_triton(x, residual, weights, scale, post)
    residual.add_(x if post is None else norm_cpu(x, post), alpha=scale)
    return residual if weights is None else norm_cpu(residual, weights), residual


def norm_cpu(x: Tensor, weights: NormWeights) -> Tensor:
    """Like `norm`. For x of [T, Hh, D], the weight and the bias may also be [Hh, D], with vectors for each head."""
    weight, eps, kind, bias = weights
    if kind == "layer":
        if weight is None or weight.ndim == 1:
            return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
        normed = functional.layer_norm(x.float(), x.shape[-1:], eps=eps).mul_(weight)
        return (normed if bias is None else normed.add_(bias)).to(x.dtype)
    # Few calls, because for a short batch the calls cost more than the arithmetic.
    x32 = x.float()
    scale = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    scale.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    if x.dtype == torch.float32:
        normed = torch.mul(x, scale)
        return normed if weight is None else normed.mul_(weight)
    normed = x32.mul_(scale)
    if weight is None:
        return normed.to(x.dtype)
    return normed.mul_(weight).to(x.dtype) if weight.dtype == torch.float32 else normed.to(x.dtype).mul_(weight)


def norm_reference(x: Tensor, weights: NormWeights) -> Tensor:
    """The formulas, written out; shapes as in `norm_cpu`."""
    x32 = x.float()
    if weights.kind == "layer":
        x32 = x32 - x32.mean(-1, keepdim=True)
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + weights.eps)
    if weights.weight is not None:
        rounds_first = weights.kind == "rms" and weights.weight.dtype == x.dtype
        normed = weights.weight * (normed.to(x.dtype) if rounds_first else normed)
    return (normed if weights.bias is None else normed + weights.bias).to(x.dtype)


def add_norm_reference(
    x: Tensor, residual: Tensor, weights: NormWeights | None, scale: float = 1.0, post: NormWeights | None = None
) -> tuple[Tensor, Tensor]:
    """The formula, written out; does not change its arguments."""
    added = x if post is None else norm_reference(x, post)
    total = (residual.float() + scale * added.float()).to(x.dtype)
    return total if weights is None else norm_reference(total, weights), total


def _check(x: Tensor, weights: NormWeights) -> None:
    weight, _, kind, bias = weights
    if weight is not None and (weight.ndim != 1 or x.shape[-1] != weight.shape[0]):
        raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    if bias is not None and (kind == "rms" or weight is None or bias.shape != weight.shape):
        raise ValueError("only a LayerNorm with a weight has a bias, of the same shape")
