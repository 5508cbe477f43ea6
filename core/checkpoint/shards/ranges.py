"""Ranges of heads, of an MLP's inner numbers, and of the vocabulary: which are whose."""

from collections.abc import Iterable

from penstock.core.checkpoint.decoder import Range
from penstock.core.checkpoint.weight_sources import Ranges

_VOCAB_UNIT = 8
"""Rows of the vocabulary that stay together: quantized formats pack as many into words, and products like it."""


def even_part(size: int, number: int, count: int) -> Range:
    """Part `number` of `count` equal ones."""
    each = size // count
    return number * each, (number + 1) * each


def part_in_units(size: int, unit: int, number: int, count: int) -> Range:
    """The same with borders at multiples of a unit: where it does not go evenly, the first parts are a unit larger."""
    num_units = -(-size // unit)
    each, rest = divmod(num_units, count)
    first = number * each + min(number, rest)
    return min(first * unit, size), min((first + each + (number < rest)) * unit, size)


def vocab_part(vocab_size: int, number: int, count: int) -> Range:
    """The rows of the vocabulary: all parts are equal, except that the last ones may be shorter, or empty."""
    width = logit_width(vocab_size, count)
    return min(number * width, vocab_size), min((number + 1) * width, vocab_size)


def logit_width(vocab_size: int, count: int) -> int:
    """Logits of each rank before they are gathered: the largest part of the vocabulary. Shorter ones are padded.

    Gathered in the order of ranks and cut to the vocabulary, they are the whole's.
    """
    if count == 1:
        return vocab_size
    width = -(-vocab_size // count)
    rounded = -(-width // _VOCAB_UNIT) * _VOCAB_UNIT
    return rounded if (count - 1) * rounded < vocab_size else width


def kv_part(num_kv_heads: int, number: int, count: int) -> Range:
    """The KV heads of a rank. With fewer heads than ranks, neighbours have the same one."""
    if num_kv_heads < count:
        head = number * num_kv_heads // count
        return head, head + 1
    return even_part(num_kv_heads, number, count)


def times(ranges: Iterable[Range], size: int, first: int = 0) -> Ranges:
    """What these ranges are if each number stands for `size` others, from `first` on."""
    return tuple((first + begin * size, first + end * size) for begin, end in ranges)
