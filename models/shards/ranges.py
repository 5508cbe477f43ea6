"""Which ranges of heads, of an MLP's inner size, and of the vocabulary each rank has."""

from collections.abc import Iterable

from penstock.models.description.decoder import Range
from penstock.models.weights.sources import Ranges

_VOCAB_UNIT = 8
"""Rows of the vocabulary that stay together: quantized formats pack this many into words, and it suits products."""


def even_part(size: int, number: int, count: int) -> Range:
    """Return part `number` of `count` equal parts."""
    each = size // count
    return number * each, (number + 1) * each


def part_in_units(size: int, unit: int, number: int, count: int) -> Range:
    """Like `even_part`, with borders at multiples of a unit; if it is not even, the first parts are a unit larger."""
    num_units = -(-size // unit)
    each, rest = divmod(num_units, count)
    first = number * each + min(number, rest)
    return min(first * unit, size), min((first + each + (number < rest)) * unit, size)


def vocab_part(vocab_size: int, number: int, count: int) -> Range:
    """Return a rank's rows of the vocabulary: equal parts, but the last ones may be shorter or empty."""
    width = logit_width(vocab_size, count)
    return min(number * width, vocab_size), min((number + 1) * width, vocab_size)


def logit_width(vocab_size: int, count: int) -> int:
    """Return the width of each rank's logits before gathering: the largest vocabulary part. Shorter ones are padded.

    Gathered in the order of ranks and cut to the vocabulary, they are the whole model's logits.
    """
    if count == 1:
        return vocab_size
    width = -(-vocab_size // count)
    rounded = -(-width // _VOCAB_UNIT) * _VOCAB_UNIT
    return rounded if (count - 1) * rounded < vocab_size else width


def kv_part(num_kv_heads: int, number: int, count: int) -> Range:
    """Return the KV heads of a rank. With fewer heads than ranks, neighbouring ranks have the same head."""
    if num_kv_heads < count:
        head = number * num_kv_heads // count
        return head, head + 1
    return even_part(num_kv_heads, number, count)


def times(ranges: Iterable[Range], size: int, first: int = 0) -> Ranges:
    """Return the ranges with each number expanded to `size` numbers, from `first` on."""
    return tuple((first + begin * size, first + end * size) for begin, end in ranges)
