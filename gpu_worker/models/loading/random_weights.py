"""Random weights in place of a checkpoint's: the same each time, and on a rank the same as in the whole model."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from zlib import crc32

import torch
from torch import Tensor

from penstock.models.parsing.family import Shape
from penstock.models.weights.sources import Ranges

_STD = 0.02
_TILE = (1024, 2048)
"""Each tile of a matrix is drawn at once, from a seed of its own. A rank draws only the tiles that overlap its part."""


class RandomWeights:
    """Tensors by their names."""

    def __init__(self, shapes: Mapping[str, Shape], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self._dtype, self._device = shapes, dtype, device
        self._generator = torch.Generator(device)

    def read(self, name: str, ranges: Sequence[Ranges | None] = ()) -> Tensor:
        """A tensor, or these ranges of each of its axes."""
        shape = self._shapes[name]
        chosen = [its or ((0, size),) for size, its in zip(shape, ranges or [None] * len(shape), strict=True)]
        part = self._empty([sum(end - begin for begin, end in its) for its in chosen])
        if name.endswith("norm.weight"):
            return part.fill_(1)
        tile = (*(1,) * (len(shape) - len(_TILE)), *_TILE)[-len(shape) :]
        for pieces in product(*map(_pieces, chosen, tile)):
            numbers, here, there = zip(*pieces, strict=True)
            size = [min(each, all - number * each) for each, all, number in zip(tile, shape, numbers, strict=True)]
            target = part[there]
            is_all = target.shape == torch.Size(size) and target.is_contiguous()
            drawn = target if is_all else self._empty(size)
            drawn.normal_(0.0, _STD, generator=self._generator.manual_seed(crc32(f"{name} {numbers}".encode())))
            if not is_all:
                target.copy_(drawn[here])
        return part

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)


def _pieces(ranges: Ranges, tile: int) -> Iterator[tuple[int, slice, slice]]:
    """For an axis cut into tiles: the number of each touched tile, the part of it to take, and where that part goes."""
    first = 0
    for begin, end in ranges:
        for number in range(begin // tile, -(-end // tile)):
            least, most = max(begin, number * tile), min(end, (number + 1) * tile)
            yield number, slice(least - number * tile, most - number * tile), slice(first, first + most - least)
            first += most - least
