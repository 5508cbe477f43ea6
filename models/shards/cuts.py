"""Cuts a weight's source to a part of the weight, whatever the order in which it is stored."""

from collections.abc import Iterable, Sequence
from functools import cache

from penstock.models.description.decoder import Range
from penstock.models.weights.sources import WHOLE, Cut, LinearSource, NormSource, Ranges, Source


def outputs_of(source: Source, chosen: Ranges) -> Source:
    """Return the source of these outputs of the weight, range after range; of every expert, if it has experts.

    Args:
        source: must not have cut outputs yet.
        chosen: ascending ranges without overlaps.
    """
    num_names = len(source.names)
    per_item = num_names // source.num_stacked if source.num_stacked else num_names
    sizes = [source.num_outputs(i) for i in range(per_item)]
    order, stored = None, chosen
    if source.order is not None:
        order, stored = _in_stored_order(source.order, chosen)
    of_each = _by_tensor(stored, sizes)
    kept = [i for i in range(num_names) if of_each[i % per_item]]
    return source._replace(
        names=tuple(source.names[i] for i in kept),
        shapes=tuple(source.shapes[i] for i in kept),
        order=order,
        cuts=tuple(source.cut(i)._replace(outputs=_or_all(of_each[i % per_item], sizes[i % per_item])) for i in kept),
    )


def inputs_of(source: Source, chosen: Ranges) -> Source:
    """Return the source of the weight's columns for these inputs."""
    return _cut(source, [source.cut(i)._replace(inputs=chosen) for i in range(len(source.names))])


def items_of(source: Source, chosen: Ranges) -> Source:
    """Return the source of these experts (or heads with their own norms), in this order."""
    if source.has_items:
        return _cut(source, [source.cut(i)._replace(items=chosen) for i in range(len(source.names))])
    per_item = len(source.names) // source.num_stacked
    kept = [item * per_item + i for begin, end in chosen for item in range(begin, end) for i in range(per_item)]
    return source._replace(
        names=tuple(source.names[i] for i in kept),
        shapes=tuple(source.shapes[i] for i in kept),
        cuts=tuple(source.cut(i) for i in kept) if source.cuts else (),
        num_stacked=len(kept) // per_item,
    )


def columns(linear: LinearSource, chosen: Ranges) -> LinearSource:
    """Return these outputs of a column-parallel product, with their biases."""
    return LinearSource(
        outputs_of(linear.weight, chosen), None if linear.bias is None else outputs_of(linear.bias, chosen)
    )


def rows(linear: LinearSource, chosen: Ranges, *, has_bias: bool) -> LinearSource:
    """Return these inputs of a row-parallel product. One rank adds the bias."""
    return LinearSource(inputs_of(linear.weight, chosen), linear.bias if has_bias else None)


def norm_part(norm: NormSource | None, heads: Ranges, dim: int) -> NormSource | None:
    """Return the part of a norm with weights per head that belongs to these heads, each with `dim` numbers."""
    if norm is None:
        return None

    def part(source: Source | None) -> Source | None:
        if source is None:
            return None
        if source.has_items or source.num_stacked:
            return items_of(source, heads)
        return outputs_of(source, tuple((begin * dim, end * dim) for begin, end in heads))

    return NormSource(norm.norm, part(norm.weight), part(norm.bias))


def _cut(source: Source, cuts: Iterable[Cut]) -> Source:
    made = tuple(cuts)
    return source._replace(cuts=made if any(cut != WHOLE for cut in made) else ())


def _or_all(ranges: Ranges, size: int) -> Ranges | None:
    return None if ranges == ((0, size),) else ranges


def _by_tensor(stored: Ranges, sizes: Sequence[int]) -> list[Ranges]:
    """Return ranges of the stack as ranges of each of its tensors."""
    found: list[Ranges] = []
    first = 0
    for size in sizes:
        within = ((max(begin - first, 0), min(end - first, size)) for begin, end in stored)
        found.append(joined(each for each in within if each[0] < each[1]))
        first += size
    return found


def joined(ranges: Iterable[Range]) -> Ranges:
    """Merge adjacent ranges of an ascending sequence."""
    found: list[Range] = []
    for begin, end in ranges:
        if found and found[-1][1] == begin:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return tuple(found)


@cache
def _in_stored_order(order: tuple[int, ...], chosen: Ranges) -> tuple[tuple[int, ...] | None, Ranges]:
    """Return the order within what is read of the stack (None: in order), and the ranges that are read."""
    wanted = [order[i] for begin, end in chosen for i in range(begin, end)]
    stored = sorted(wanted)
    place = {output: i for i, output in enumerate(stored)}
    ranges = joined((output, output + 1) for output in stored)
    return (None if wanted == stored else tuple(place[output] for output in wanted)), ranges
