"""The interface of vision towers, and the parts that towers are made of."""

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.models.vision.tower import VisionActivation, VisionTower

_PART = 1 << 27
"""Multiplications in a part of the work: a millisecond or two of a core. Smaller parts would take a tenth longer."""

_ATTENTION_COSTS = 3
"""A multiplication in attention takes so many times as long as one in a product with weights."""

_PART_NUMBERS = 1 << 18
"""Numbers in a part with a few operations for each number: half a millisecond of a core."""

Rotation = tuple[Tensor, Tensor]
"""fp32[patches, half of a head], twice: cosines and sines of the angles by which each patch's pairs are rotated."""

Parts = Generator[None, None, Tensor]
"""Computes a tensor, and yields after each part of the work."""


class Tower(Protocol):
    """Makes the embeddings of pictures, part by part, so that steps can run in between."""

    @property
    def vision(self) -> VisionTower:
        """The description of the tower."""

    @property
    def device(self) -> torch.device:
        """The device on which it computes."""

    @property
    def embedding_bytes(self) -> int:
        """Bytes of one embedding."""

    def encode(self, pixels: Any, grid: Sequence[int]) -> Iterator[Tensor | None]:
        """Compute a picture's embeddings, part by part.

        Args:
            pixels: a tensor of the shape that `vision` says; for a tower of `transformers`, tensors by their names.
            grid: as the processor gives it.

        Yields:
            None after each part of the work, and at last [embeddings, width].
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
    """Attention and an MLP, each with a residual connection."""

    norm1: TowerNorm
    qkv: Matrix
    proj: Matrix
    norm2: TowerNorm
    mlp: tuple[Matrix, ...]  # the last one projects down; if there are two before it, the first is a gate


class PatchMLPBlock(NamedTuple):
    """See `PatchMLP`."""

    first: Matrix
    second: Matrix
    activation: VisionActivation

    def __call__(self, x: Tensor) -> Parts:
        """[.., P, features] -> [.., P, out_size]"""
        size = self.first.weight.numel() + self.second.weight.numel()
        return in_parts(lambda part: self.second(activated(self.first(part), self.activation)), x, size)


def in_parts(function: Callable[[Tensor], Tensor], x: Tensor, num_multiplications: int) -> Parts:
    """function(x), some vectors at a time, where each takes `num_multiplications`. A GPU takes all at once."""
    rows = x.flatten(0, -2)
    size = max(16, _PART // num_multiplications) if x.device.type == "cpu" else len(rows)
    whole: Tensor | None = None
    for first in range(0, len(rows), size):
        made = function(rows[first : first + size])
        if whole is None:  # joining the parts at the end would make the last part a long one
            whole = made if size >= len(rows) else made.new_empty(len(rows), made.shape[-1])
        if whole is not made:
            whole[first : first + size] = made
        yield
    assert whole is not None
    out: Tensor = whole.unflatten(0, x.shape[:-1])
    return out


def compute(layer: TowerLayer, x: Tensor, kind: VisionActivation, attend: Callable[[Tensor], Parts]) -> Parts:
    """[.., P, hidden] -> the same shape, the output of a layer."""
    qkv = yield from in_parts(lambda part: layer.qkv(layer.norm1(part)), x, layer.qkv.weight.numel())
    seen = yield from attend(qkv)
    x = x + (yield from in_parts(lambda part: layer.proj(part), seen, layer.proj.weight.numel()))
    size = sum(matrix.weight.numel() for matrix in layer.mlp)
    return x + (yield from in_parts(lambda part: mlp(layer, layer.norm2(part), kind), x, size))


def through(
    layers: Sequence[TowerLayer],
    x: Tensor,
    kind: VisionActivation,
    attend: Callable[[Tensor], Parts],
    features: Sequence[int],
) -> Parts:
    """[.., P, hidden] -> [.., P, hidden * len(features)]: the outputs after these numbers of layers, side by side."""
    found = {0: x}
    for i, layer in enumerate(layers):
        x = yield from compute(layer, x, kind, attend)
        if i + 1 in features:
            found[i + 1] = x
    return torch.cat([found[number] for number in features], dim=-1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """Scaled dot products of [groups, heads, P, D]; positions of a group see each other."""
    num_groups, num_heads, length, width = q.shape
    rows = queries_at_once(num_heads * width, length, q.device)
    groups = max(1, rows // length)
    out = torch.empty_like(q)
    for group in range(0, num_groups, groups):
        its = slice(group, group + groups)
        for row in range(0, length, rows):
            some = q[its, :, row : row + rows]
            out[its, :, row : row + rows] = functional.scaled_dot_product_attention(some, k[its], v[its])
            yield
    return out


def queries_at_once(width: int, length: int, device: torch.device) -> int:
    """How many queries of `width` numbers make a part, if each sees `length` positions. A GPU takes all at once."""
    return max(16, _PART // (2 * _ATTENTION_COSTS * width * length)) if device.type == "cpu" else sys.maxsize


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


def rotate(heads: Tensor, rotation: Rotation) -> Generator[None, None, None]:
    """Rotate the pairs of [P, heads, D] in place, some vectors at a time. A GPU takes all at once."""
    cos, sin = rotation
    size = max(16, _PART_NUMBERS // heads[0].numel()) if heads.device.type == "cpu" else len(heads)
    for first in range(0, len(heads), size):
        its = slice(first, first + size)
        heads[its] = _rotated(heads[its], (cos[its], sin[its]))
        yield


def _rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate in fp32; the two numbers of a pair are in different halves."""
    cos, sin = (each[:, None] for each in rotation)
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
