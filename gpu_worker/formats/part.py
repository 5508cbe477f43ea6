"""Reads a part of a quantized matrix: its stored data, and as little else as the format allows."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from penstock.gpu_worker.formats import bitsandbytes
from penstock.gpu_worker.formats.registry import decode
from penstock.kernels.quantized.weight import QuantizedWeight
from penstock.models.files.source import LoadError
from penstock.models.formats.bitsandbytes import BlocksMatrix
from penstock.models.formats.format import MatrixFormat, Part
from penstock.models.weights.sources import Cut, Ranges

ReadPart = Callable[[str, tuple[Ranges | None, ...]], Tensor]
"""Reads some ranges of each axis of a stored tensor, by its role; no ranges: all of it."""


_NOT_CUT = 1 << 62
"""A unit for axes that are only read as a whole."""


def decode_part(
    format: MatrixFormat, parts: Mapping[str, Part], shape: tuple[int, ...], cut: Cut, read: ReadPart
) -> QuantizedWeight:
    """Read a part of a matrix.

    Args:
        format: of the matrix.
        parts: the tensors that are stored for it, by role.
        shape: [N, K] of the whole; for experts in one tensor, [E, N, K].
        cut: the wanted part; inputs are one range.
        read: takes ranges for the axes of `Part.shape`.

    Returns:
        The same numbers as in that part of the whole. If groups of inputs do not end at the borders of the part, the
        part has smaller groups.

    Raises:
        LoadError: groups are not made of consecutive inputs.
    """
    outputs, inputs = cut.outputs or ((0, shape[-2]),), cut.inputs or ((0, shape[-1]),)
    around = Cut(
        cut.items,
        _enclosing(outputs, _unit(parts, "outputs"), shape[-2]),
        _enclosing(inputs, _unit(parts, "inputs"), shape[-1]),
    )
    there = {role: read(role, _stored_ranges(part, around)) for role, part in parts.items()}
    if "shape" in there:
        there["shape"] = torch.tensor([_size(around.outputs), _size(around.inputs)])
    if "groups" in there and cut.inputs is not None:
        there["groups"] = _groups_of_part(there["groups"], format)
    if isinstance(format, BlocksMatrix):
        weight = bitsandbytes.decode_part(format, there, around)
    else:
        weight = decode(format, there)
    if (wanted := _within(outputs, around.outputs)) is not None:
        weight = weight.of_outputs(wanted)
    if inputs != around.inputs:
        ((begin, end),), ((first, _),) = inputs, around.inputs or ()
        weight = weight.of_inputs(begin - first, end - first)
    return weight


def _unit(parts: Mapping[str, Part], axis: Literal["outputs", "inputs"]) -> int:
    along = [its for part in parts.values() for its in part.axes if its is not None and its.axis == axis]
    return math.lcm(*(its.num for its in along)) if along else _NOT_CUT


def _enclosing(ranges: Ranges, unit: int, size: int) -> Ranges:
    """The ranges with their borders moved outward to multiples of the unit."""
    found: list[tuple[int, int]] = []
    for begin, end in ranges:
        wide = begin // unit * unit, min(-(-end // unit) * unit, size)
        if found and wide[0] <= found[-1][1]:
            found[-1] = found[-1][0], wide[1]
        else:
            found.append(wide)
    return tuple(found)


def _stored_ranges(part: Part, cut: Cut) -> tuple[Ranges | None, ...]:
    """Where these outputs and inputs are in a stored tensor."""
    of_axes = {"items": cut.items, "outputs": cut.outputs, "inputs": cut.inputs}
    ranges: list[Ranges | None] = []
    for its in part.axes:
        chosen = None if its is None else of_axes[its.axis]
        if its is not None and chosen is not None:
            chosen = tuple((b * its.stored // its.num, -(-e * its.stored // its.num)) for b, e in chosen)
        ranges.append(chosen)
    return tuple(ranges)


def _size(ranges: Ranges | None) -> int:
    return sum(end - begin for begin, end in ranges or ())


def _groups_of_part(groups: Tensor, format: MatrixFormat) -> Tensor:
    """The group of each input, counted from the part's first group."""
    groups = groups - groups.min()
    size = getattr(format, "group_size", None) or len(groups)
    if not torch.equal(groups.long(), torch.arange(len(groups)) // size):
        raise LoadError(
            "the weights cannot be split over workers: inputs are quantized in the order of their importance (g_idx), "
            "so that each worker would need some of every group"
        )
    return groups


def _within(wanted: Ranges, there: Ranges | None) -> Tensor | None:
    """The indices of the wanted outputs among those that were read; None if these are the same."""
    if there is None or wanted == there:
        return None
    outputs = torch.cat([torch.arange(begin, end) for begin, end in there])
    return torch.searchsorted(outputs, torch.cat([torch.arange(begin, end) for begin, end in wanted]))
