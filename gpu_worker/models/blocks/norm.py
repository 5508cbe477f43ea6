"""Norms, and the residual stream that they read."""

from typing import NamedTuple

from torch import Tensor

from penstock.core.checkpoint.decoder import Norm
from penstock.kernels.rms_norm import add_rms_norm, rms_norm


class NormBlock(NamedTuple):
    """A norm of [T, H]."""

    norm: Norm
    weight: Tensor | None  # [H]; the description's offset is in it
    bias: Tensor | None  # [H]

    def __call__(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return rms_norm(x, self.weight, self.norm.eps)

    def add(self, x: Tensor, residual: Tensor, scale: float) -> Tensor:
        """residual += scale * x, in place; returns its norm."""
        assert self.weight is not None
        return add_rms_norm(x if scale == 1.0 else x.mul_(scale), residual, self.weight, self.norm.eps)[0]


def add_and_norm(x: Tensor, residual: Tensor, norm: NormBlock | None, scale: float) -> Tensor:
    """residual += scale * x, in place; returns what the next block reads: its norm, or the stream itself."""
    return residual.add_(x, alpha=scale) if norm is None else norm.add(x, residual, scale)
