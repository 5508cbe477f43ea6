"""The sources of weights: tensors of a checkpoint, or parts of them."""

from typing import NamedTuple

from penstock.models.description.decoder import Norm, Range
from penstock.models.parsing.family import Shape

Ranges = tuple[Range, ...]


class Cut(NamedTuple):
    """The part of a tensor that is read, for each kind of axis; None: all."""

    items: Ranges | None = None  # experts, or heads with their own norms, if one tensor holds all of them
    outputs: Ranges | None = None
    inputs: Ranges | None = None


WHOLE = Cut()


class Source(NamedTuple):
    """A weight: tensors of the checkpoint, stacked along the axis of their outputs."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]  # of each tensor, as it is stored
    is_transposed: bool = False  # the last two axes must be swapped
    order: tuple[int, ...] | None = None  # output i of the weight is output order[i] of the stack
    axis: int = 0  # of the outputs
    num_stacked: int = 0  # experts with equally many tensors each; they become the first axis
    cuts: tuple[Cut, ...] = ()  # the part read of each tensor; empty: everything

    @property
    def has_items(self) -> bool:
        """Whether the first axis of each tensor is that of experts or heads."""
        return self.axis == 1 and not self.num_stacked

    def cut(self, i: int) -> Cut:
        """Return the part that is read of tensor `i`."""
        return self.cuts[i] if self.cuts else WHOLE

    def stored_ranges(self, i: int) -> tuple[Ranges | None, ...]:
        """Return the ranges that are read of tensor `i`, for each stored axis."""
        cut, num_axes = self.cut(i), len(self.shapes[i])
        ranges: list[Ranges | None] = [cut.items] if self.has_items else []
        of_matrix = [cut.inputs, cut.outputs] if self.is_transposed else [cut.outputs, cut.inputs]
        ranges += of_matrix[: num_axes - len(ranges)]
        return (*ranges, *(None,) * (num_axes - len(ranges)))

    def part_shape(self, i: int) -> Shape:
        """Return the stored shape of the part that is read of tensor `i`."""
        pairs = zip(self.shapes[i], self.stored_ranges(i), strict=True)
        return tuple(size if ranges is None else sum(end - begin for begin, end in ranges) for size, ranges in pairs)

    def num_outputs(self, i: int) -> int:
        """Return the number of outputs of the whole tensor `i`."""
        return self.shapes[i][-1 if self.is_transposed else int(self.has_items)]


class LinearSource(NamedTuple):
    """A matrix [out, in], or [experts, out, in] for experts."""

    weight: Source
    bias: Source | None = None


class NormSource(NamedTuple):
    """A norm's weights."""

    norm: Norm
    weight: Source | None
    bias: Source | None


def linear(
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    num_inputs: int,
    has_bias: bool,
    is_transposed: bool = False,
    order: tuple[int, ...] | None = None,
) -> LinearSource:
    """Return a matrix of parts of these sizes, each stored by itself, or all in one tensor."""
    if len(names) == 1:
        sizes = (sum(sizes),)
    weights = tuple((num_inputs, size) if is_transposed else (size, num_inputs) for size in sizes)
    weight = Source(tuple(f"{name}.weight" for name in names), weights, is_transposed, order)
    bias = Source(tuple(f"{name}.bias" for name in names), tuple((size,) for size in sizes), order=order)
    return LinearSource(weight, bias if has_bias else None)


def vector(name: str, *shape: int, order: tuple[int, ...] | None = None) -> Source:
    """Return a tensor of this shape, whose name ends with ".weight"."""
    return Source((f"{name}.weight",), (shape,), order=order)


def norm_of(norm: Norm | None, name: str, size: int, order: tuple[int, ...] | None = None) -> NormSource | None:
    """Return a norm over `size` numbers."""
    if norm is None:
        return None
    weight = vector(name, size, order=order) if norm.has_weight else None
    return NormSource(norm, weight, Source((f"{name}.bias",), ((size,),), order=order) if norm.has_bias else None)


def prefixed(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the full names of a layer's parts."""
    return tuple(prefix + name for name in names)
