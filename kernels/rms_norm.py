"""RMSNorm, alone and fused with the residual addition before it (Zhang and Sennrich, 2019)."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each last-dimension vector of `x` to unit root mean square, then by `weight`.

    Args:
        x: [..., H].
        weight: [H].
        eps: added to the mean square.

    Returns:
        [..., H] in the dtype of `x`. The mean is taken in fp32; the result is rounded to the dtype of
        `x` before the weight multiplies it, as transformers does.
    """
    _check(x, weight)
    if x.is_cuda:
        from penstock.kernels.triton.rms_norm import rms_norm_triton

        return rms_norm_triton(x, weight, eps)
        # Few and small calls: for a short batch the calls cost more than the arithmetic.
    x32 = x.float()
    scale = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    scale.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    if x.dtype == torch.float32:
        return torch.mul(x, scale).mul_(weight)
    return x32.mul_(scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`residual += x`, then RMSNorm of the sum.

    Args:
        x: [T, H], what a layer computed.
        residual: [T, H], the stream it is added to; updated in place.
        weight: [H].
        eps: added to the mean square.

    Returns:
        (normed [T, H], residual [T, H]): the second is the updated `residual` itself.
    """
    _check(x, weight)
    if x.shape != residual.shape:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} differ in shape")
    if x.is_cuda:
        from penstock.kernels.triton.rms_norm import add_rms_norm_triton

        return add_rms_norm_triton(x, residual, weight, eps)
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula, written out."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The formula, written out; does not change its arguments."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.ndim != 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
