"""The vision tower for pictures of a fixed size, or for tiles of that size, with torch's kernels."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.gpu_worker.models.vision.tower import (
    Matrix,
    Parts,
    PatchMLPBlock,
    TowerLayer,
    TowerNorm,
    attended,
    in_parts,
    through,
)
from penstock.models.vision.tiles import TileVision
from penstock.models.vision.views import WholeThenTiles


class TilePoolBlock(NamedTuple):
    """See `TilePool`."""

    side: int
    norm: TowerNorm
    matrix: Matrix

    def __call__(self, x: Tensor) -> Parts:
        """[tiles, P, hidden] -> [tiles, side * side, out_size]"""
        square = math.isqrt(x.shape[1]) // self.side
        pooled = x.unflatten(1, (self.side, square, self.side, square)).mean((2, 4)).flatten(1, 2)
        return in_parts(lambda part: self.matrix(self.norm(part).to(x.dtype)), pooled, self.matrix.weight.numel())


class TileSquaresBlock(NamedTuple):
    """See `TileSquares`."""

    square: int
    matrix: Matrix

    def __call__(self, x: Tensor) -> Parts:
        """[tiles, P, hidden] -> [tiles, squares, out_size]"""
        side = math.isqrt(x.shape[1]) // self.square
        squares = x.unflatten(1, (side, self.square, side, self.square)).transpose(2, 3)
        squares = squares.flatten(3).flatten(1, 2)
        return in_parts(lambda part: self.matrix(part), squares, self.matrix.weight.numel())


class TileTower(NamedTuple):
    """See `Tower`."""

    vision: TileVision
    patches: Matrix
    begin: Tensor | None  # [hidden], before the patches
    positions: Tensor  # [P, hidden]
    first_norm: TowerNorm | None
    layers: tuple[TowerLayer, ...]
    last_norm: TowerNorm | None
    made: PatchMLPBlock | TilePoolBlock | TileSquaresBlock
    newline: Tensor | None  # [out_size], ends rows of embeddings

    @property
    def device(self) -> torch.device:
        return self.positions.device

    @property
    def embedding_bytes(self) -> int:
        return self.vision.width * self.positions.element_size()

    def encode(self, pixels: Tensor, grid: Sequence[int]) -> Iterator[Tensor | None]:
        """`pixels`: [.., tiles, channels, rows, columns]"""
        vision, size = self.vision, self.vision.patch
        x = pixels.to(self.device, self.positions.dtype).flatten(0, -4)
        x = functional.unfold(x, size, stride=size).transpose(1, 2)  # [tiles, patches, numbers]
        x = yield from in_parts(lambda part: self.patches(part), x, self.patches.weight.numel())
        if self.begin is not None:
            x = torch.cat((self.begin.expand(len(x), 1, -1), x), dim=1)
        x = x + self.positions
        if self.first_norm is not None:
            x = self.first_norm(x)
        x = yield from through(self.layers, x, vision.activation, self._attend, vision.features)
        if self.last_norm is not None:
            x = self.last_norm(x)
        made = yield from self.made(x[:, 1:] if vision.drops_first else x)
        if self.newline is not None and isinstance(vision.views, WholeThenTiles):
            yield _together(made, vision.views, self.newline, *grid)
        else:
            yield made.flatten(0, 1)

    def _attend(self, qkv: Tensor) -> Parts:
        """[tiles, P, 3 * hidden] -> [tiles, P, hidden]; patches of a tile see each other."""
        q, k, v = qkv.unflatten(-1, (3, self.vision.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return (yield from attended(q, k, v)).transpose(1, 2).flatten(2)


def _together(made: Tensor, views: WholeThenTiles, newline: Tensor, height: int, width: int) -> Tensor:
    """[1 + tiles, P, out_size] -> [embeddings, out_size]: the view of the whole picture, then rows across all tiles."""
    side, (tile_rows, tile_columns, rows, columns) = views.side, views.layout(height, width)
    whole = made[1:].view(tile_rows, tile_columns, side, side, -1).transpose(1, 2)
    whole = whole.reshape(tile_rows * side, tile_columns * side, -1)
    top, left = (whole.shape[0] - rows) // 2, (whole.shape[1] - columns) // 2
    whole = whole[top : top + rows, left : left + columns]
    ended = torch.cat((whole, newline.expand(rows, 1, -1)), dim=1)
    return torch.cat((made[0], ended.flatten(0, 1)))
