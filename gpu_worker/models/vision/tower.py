"""What a vision tower is to others, and what towers are made of."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.core.checkpoint.vision import VisionActivation, VisionTower


class Tower(Protocol):
    """Makes the embeddings of pictures, one layer at a time, so that steps can go between."""

    @property
    def vision(self) -> VisionTower:
        """What it is."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    def embedding_bytes(self) -> int:
        """Of one embedding."""

    def encode(self, pixels: Tensor, grid: Sequence[int]) -> Iterator[Tensor | None]:
        """Compute a picture: nothing after each part of the work, at last its embeddings.

        Args:
            pixels: of the shape that `vision` says.
            grid: as the processor tells it.

        Yields:
            None, then [embeddings, width].
        """


class Matrix(NamedTuple):
    """x @ weight^T + bias."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class TowerNorm(NamedTuple):
    """A norm over each vector; with a bias it is a layer norm."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            wide = x.float()
            return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class TowerLayer(NamedTuple):
    """Attention and an MLP, each added to what comes in."""

    norm1: TowerNorm
    qkv: Matrix
    proj: Matrix
    norm2: TowerNorm
    mlp: tuple[Matrix, ...]  # the last one leads back; before it two: the first is a gate


def mlp(layer: TowerLayer, x: Tensor, kind: VisionActivation) -> Tensor:
    first, *others = layer.mlp
    inner = activated(first(x), kind)
    if len(others) > 1:
        inner = inner * others[0](x)
    return others[-1](inner)


def activated(x: Tensor, kind: VisionActivation) -> Tensor:
    match kind:
        case "silu":
            return functional.silu(x)
        case "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
