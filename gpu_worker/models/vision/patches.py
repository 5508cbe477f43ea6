"""Pixtral's vision tower, with torch's kernels."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.gpu_worker.models.vision.tower import (
    Matrix,
    Parts,
    PatchMLPBlock,
    Rotation,
    TowerLayer,
    TowerNorm,
    attended,
    in_parts,
    rotate,
    through,
)
from penstock.models.vision.patches import PatchVision


class SquareMergeBlock(NamedTuple):
    """See `SquareMerge`."""

    square: int
    norm: TowerNorm
    matrix: Matrix

    def __call__(self, x: Tensor, rows: int, columns: int) -> Parts:
        """[rows * columns, hidden] -> [squares, hidden]; the matrix takes a square's patches interleaved by number."""
        sides = (rows // self.square, self.square, columns // self.square, self.square)
        squares = self.norm(x).unflatten(0, sides).permute(0, 2, 4, 1, 3)
        return in_parts(lambda part: self.matrix(part), squares.flatten(2).flatten(0, 1), self.matrix.weight.numel())


class PatchTower(NamedTuple):
    """See `Tower`."""

    vision: PatchVision
    patches: Matrix
    first_norm: TowerNorm
    layers: tuple[TowerLayer, ...]
    merge: SquareMergeBlock | None
    made: PatchMLPBlock

    @property
    def device(self) -> torch.device:
        return self.patches.weight.device

    @property
    def embedding_bytes(self) -> int:
        return self.vision.width * self.patches.weight.element_size()

    def encode(self, pixels: Tensor, grid: Sequence[int]) -> Iterator[Tensor | None]:
        """`pixels`: [1, channels, height, width]; `grid`: height, width."""
        vision, size = self.vision, self.vision.patch
        pixels = pixels.to(self.device, self.patches.weight.dtype)
        x = functional.unfold(pixels, size, stride=size)[0].T  # [patches, numbers], row by row
        x = yield from in_parts(lambda part: self.patches(part), x, self.patches.weight.numel())
        x = self.first_norm(x)
        rows, columns = (pixels_of_side // size for pixels_of_side in grid)
        attend = partial(self._attend, _rotation(vision, rows, columns, self.device))
        x = yield from through(self.layers, x, vision.activation, attend, vision.features)
        if self.merge is not None:
            x = yield from self.merge(x, rows, columns)
        yield (yield from self.made(x))

    def _attend(self, rotation: Rotation, qkv: Tensor) -> Parts:
        """[P, 3 * hidden] -> [P, hidden]; all patches see each other."""
        heads = qkv.view(len(qkv), 3 * self.vision.num_heads, -1)
        yield from rotate(heads[:, : 2 * self.vision.num_heads], rotation)
        q, k, v = (its.transpose(0, 1)[None] for its in heads.chunk(3, dim=1))
        return (yield from attended(q, k, v))[0].transpose(0, 1).flatten(1)


def _rotation(vision: PatchVision, rows: int, columns: int, device: torch.device) -> Rotation:
    """fp32[patches, half of a head], twice: cosines and sines.

    One half of the angles depends on the row, with the even frequencies. The other half depends on the column, with the
    odd ones.
    """
    half = vision.hidden_size // vision.num_heads // 2
    frequencies = 1.0 / vision.theta ** (torch.arange(half, dtype=torch.float32) / half)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    turned = [place.flatten()[:, None] * its for place, its in ((row, frequencies[0::2]), (column, frequencies[1::2]))]
    angles = torch.cat(turned, dim=1).to(device)
    return angles.cos(), angles.sin()
