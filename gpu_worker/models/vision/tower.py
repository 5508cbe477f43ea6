"""What a vision tower is to others, and what towers are made of."""

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.core.checkpoint.vision.tower import VisionActivation, VisionTower

_PART = 1 << 27
"""Multiplications between which steps may go on: a millisecond or two of a core. Smaller parts take a tenth longer."""

_ATTENTION_COSTS = 3
"""A multiplication takes so many times as long there as in a product with weights."""

_PART_NUMBERS = 1 << 18
"""Numbers of a part that has a few operations on each of them: half a millisecond of a core."""

Rotation = tuple[Tensor, Tensor]
"""fp32[patches, half of a head], twice: cosine and sine of the angles by which a patch's pairs are turned."""

Parts = Generator[None, None, Tensor]
"""Computes a tensor, and stops after each part."""


class Tower(Protocol):
    """Makes the embeddings of pictures, part by part, so that steps can go between."""

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
    """function(x), some vectors of `x` at a time: each takes so many multiplications. A GPU takes them all at once."""
    rows = x.flatten(0, -2)
    size = max(16, _PART // num_multiplications) if x.device.type == "cpu" else len(rows)
    whole: Tensor | None = None
    for first in range(0, len(rows), size):
        made = function(rows[first : first + size])
        if whole is None:  # parts that are joined at the end make that one a long one
            whole = made if size >= len(rows) else made.new_empty(len(rows), made.shape[-1])
        if whole is not made:
            whole[first : first + size] = made
        yield
    assert whole is not None
    out: Tensor = whole.unflatten(0, x.shape[:-1])
    return out


def compute(layer: TowerLayer, x: Tensor, kind: VisionActivation, attend: Callable[[Tensor], Parts]) -> Parts:
    """[.., P, hidden] -> the same, behind a layer."""
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
    """[.., P, hidden] -> [.., P, hidden * features]: what comes out behind so many layers each, side by side."""
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
    """How many make a part, if each has so many numbers and sees so many positions. A GPU takes all at once."""
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
    """Turn the pairs of [P, heads, D] in place, some vectors at a time; a GPU takes them all at once."""
    cos, sin = rotation
    size = max(16, _PART_NUMBERS // heads[0].numel()) if heads.device.type == "cpu" else len(heads)
    for first in range(0, len(heads), size):
        its = slice(first, first + size)
        heads[its] = _rotated(heads[its], (cos[its], sin[its]))
        yield


def _rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    """In fp32; a pair has a number in each half."""
    cos, sin = (each[:, None] for each in rotation)
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
