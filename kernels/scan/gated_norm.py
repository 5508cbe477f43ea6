"""The gate after a scan, and the norm before or after the gate."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class GatedNorm(NamedTuple):
    """An RMSNorm over groups of a vector of width W, with a gate; computed in fp32, rounded once at the end."""

    weight: Tensor | None = None  # [W], or [group_size] shared by all groups; None: no norm
    eps: float = 1e-6  # added to the mean square
    group_size: int = 0  # divides W; 0: W
    norms_first: bool = False  # norm(x) * silu(gate), instead of norm(x * silu(gate))
    is_sigmoid: bool = False  # sigmoid instead of silu


def gated_norm(x: Tensor, gate: Tensor, weights: GatedNorm) -> Tensor:
    """Norm and gate each vector.

    Args:
        x: [T, W], what a scan returned.
        gate: [T, W], the last dimension contiguous.
        weights: of the norm.

    Returns:
        [T, W], in the dtype of `x`.
    """
    weight, eps, group_size, norms_first, is_sigmoid = weights
    group_size = group_size or x.shape[1]
    if x.shape != gate.shape or x.shape[1] % group_size:
        raise ValueError(f"x {tuple(x.shape)} and gate {tuple(gate.shape)} do not fit groups of {group_size}")
    if weight is not None and weight.shape not in ((x.shape[1],), (group_size,)):
        raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)} in groups of {group_size}")
    if x.is_cuda:
        from penstock.kernels.triton.scan.gated_norm import gated_norm_triton

        return gated_norm_triton(x, gate, weights)
    y, opening = x.float(), gate.float().sigmoid() if is_sigmoid else functional.silu(gate.float())
    if weight is None:
        return opening.mul_(y).to(x.dtype)
    if not norms_first:
        y = y * opening
    groups = y.view(x.shape[0], -1, group_size)
    normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps) * weight.float().view(-1, group_size)
    y = normed.view(x.shape)
    return (y.mul_(opening) if norms_first else y).to(x.dtype)


def gated_norm_reference(x: Tensor, gate: Tensor, weights: GatedNorm) -> Tensor:
    """Group by group in float64, rounded once."""
    opening = (1 if weights.is_sigmoid else gate.double()) / (1 + (-gate.double()).exp())
    if weights.weight is None:
        return (x.double() * opening).to(x.dtype)
    size = weights.group_size or x.shape[1]
    y = x.double() if weights.norms_first else x.double() * opening
    weight = weights.weight.double().repeat(x.shape[1] // len(weights.weight))
    normed = torch.cat(
        [part / (part.pow(2).mean(-1, keepdim=True) + weights.eps).sqrt() for part in y.split(size, 1)], 1
    )
    return (normed * weight * (opening if weights.norms_first else 1)).to(x.dtype)
