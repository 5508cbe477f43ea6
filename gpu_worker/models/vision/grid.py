"""The vision tower for pictures with any grid of patches, with torch's kernels."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.gpu_worker.models.vision.tower import (
    Matrix,
    Parts,
    Rotation,
    TowerLayer,
    TowerNorm,
    attended,
    compute,
    in_parts,
    queries_at_once,
    rotate,
)
from penstock.models.vision.grid import GridVision


class Merger(NamedTuple):
    """Makes one embedding from the vectors of a square. Its norm is over each vector, or over all of them as one."""

    norm: TowerNorm
    first: Matrix
    second: Matrix

    def __call__(self, x: Tensor) -> Parts:
        """[P, hidden] -> [embeddings, out_size]"""
        size = self.first.weight.numel() + self.second.weight.numel()
        return in_parts(self._merged, x.reshape(-1, self.first.weight.shape[1]), size)

    def _merged(self, squares: Tensor) -> Tensor:
        normed = self.norm(squares.reshape(-1, len(self.norm.weight))).view(squares.shape)
        return self.second(functional.gelu(self.first(normed)))


class GridTower(NamedTuple):
    """See `Tower`."""

    vision: GridVision
    patches: Matrix
    positions: Tensor | None  # [rows * columns, hidden]
    layers: tuple[TowerLayer, ...]
    merger: Merger
    deep_mergers: tuple[Merger, ...]

    @property
    def device(self) -> torch.device:
        return self.patches.weight.device

    @property
    def embedding_bytes(self) -> int:
        return self.vision.width * self.patches.weight.element_size()

    def encode(self, pixels: Tensor, grid: Sequence[int]) -> Iterator[Tensor | None]:
        """`pixels`: [patches, numbers], by squares that are merged, row by row; `grid`: frames, rows, columns."""
        vision, square = self.vision, self.vision.merge**2
        order, of_windows = _windows(vision, grid)
        pixels = pixels.to(self.device, self.patches.weight.dtype)
        x = yield from in_parts(lambda part: self.patches(part), pixels, self.patches.weight.numel())
        if self.positions is not None:
            x = x + _stretched(self.positions, vision, grid).to(x.dtype)
        x = x.view(-1, square, vision.hidden_size)[order].view(-1, vision.hidden_size)
        angles = _angles(vision, grid, self.device)
        angles = angles.view(-1, square, angles.shape[-1])[order].view(len(x), -1)
        rotation = angles.cos(), angles.sin()
        of_frames = [grid[1] * grid[2]] * grid[0]
        made = []
        for i, layer in enumerate(self.layers):
            sees_all = not vision.window or i in vision.whole_layers
            attend = partial(self._attend, rotation, of_frames if sees_all else of_windows)
            x = yield from compute(layer, x, vision.activation, attend)
            if i in vision.deep_layers:
                made.append((yield from self.deep_mergers[vision.deep_layers.index(i)](x)))
        together = torch.cat(((yield from self.merger(x)), *made), dim=1)
        embeddings = torch.empty_like(together)
        embeddings[order] = together
        yield embeddings

    def _attend(self, rotation: Rotation, lengths: Sequence[int], qkv: Tensor) -> Parts:
        """[P, 3 * hidden] -> [P, hidden]; patches see each other within runs of these lengths."""
        heads = qkv.view(len(qkv), 3 * self.vision.num_heads, -1)
        yield from rotate(heads[:, : 2 * self.vision.num_heads], rotation)
        q, k, v = heads.chunk(3, dim=1)
        sizes = torch.tensor(lengths)
        starts = sizes.cumsum(0) - sizes
        out = torch.empty_like(v)
        for length in sorted(set(lengths)):  # all windows except those at borders have the same length
            at_once = max(1, queries_at_once(self.vision.hidden_size, length, qkv.device) // length)
            for some in starts[sizes == length].split(at_once):
                places = (some[:, None] + torch.arange(length)).to(qkv.device)
                its_q, its_k, its_v = (part[places].transpose(1, 2) for part in (q, k, v))
                out[places] = (yield from attended(its_q, its_k, its_v)).transpose(1, 2)
        return out.flatten(1)


def _angles(vision: GridVision, grid: Sequence[int], device: torch.device) -> Tensor:
    """fp32[patches, half of a head]: half of the angles depend on the row, the other half on the column."""
    quarter = vision.hidden_size // vision.num_heads // 4
    frequencies = 1.0 / vision.theta ** (torch.arange(quarter, dtype=torch.float32) / quarter)
    angles = (_places(vision, grid)[:, :, None].float() * frequencies).flatten(1)
    return angles.repeat(grid[0], 1).to(device)


def _places(vision: GridVision, grid: Sequence[int]) -> Tensor:
    """int64[patches of a frame, 2]: the row and column of each patch, square by square."""
    _, rows, columns = grid
    merge = vision.merge
    places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
    return places.view(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2).reshape(-1, 2)


def _stretched(table: Tensor, vision: GridVision, grid: Sequence[int]) -> Tensor:
    """[patches, hidden]: learned vectors, stretched to a picture by bilinear interpolation.

    The picture's corners have the vectors of the table's corners.
    """
    side, places = vision.positions, _places(vision, grid)
    at = places.float() * (side - 1) / torch.tensor([max(1, size - 1) for size in grid[1:]])
    first = at.floor().long()
    behind, share = (first + 1).clamp(max=side - 1), at - first
    made = torch.zeros(len(places), table.shape[1], device=table.device)
    for row, of_row in ((first[:, 0], 1 - share[:, 0]), (behind[:, 0], share[:, 0])):
        for column, of_column in ((first[:, 1], 1 - share[:, 1]), (behind[:, 1], share[:, 1])):
            made += table[(row * side + column).to(table.device)] * (of_row * of_column)[:, None].to(table.device)
    return made.repeat(grid[0], 1)


def _windows(vision: GridVision, grid: Sequence[int]) -> tuple[Tensor, list[int]]:
    """An order of the embeddings that keeps each window together, and how many patches each window has."""
    frames, rows, columns = grid[0], grid[1] // vision.merge, grid[2] // vision.merge
    if not vision.window:
        return torch.arange(frames * rows * columns), []
    row, column = torch.arange(rows) // vision.window, torch.arange(columns) // vision.window
    per_frame = row[:, None] * (int(column[-1]) + 1) + column
    size = int(per_frame[-1, -1]) + 1
    numbers = (torch.arange(frames)[:, None, None] * size + per_frame).flatten()
    counts = torch.bincount(numbers) * vision.merge**2
    return numbers.argsort(stable=True), [int(count) for count in counts]
