"""Common parts of several formats: codes that share 32-bit words, and groups of inputs that are not consecutive."""

import torch
from torch import Tensor

from penstock.models.files.source import LoadError

_WORD = 32


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """The codes in a stream of bits, the lowest first.

    Args:
        words: int32[..., ceil(count * bits / 32)], little-endian.
        bits: of a code, 1 to 8; codes of 3, 5, 6 or 7 bits cross word boundaries.
        count: number of codes in the last axis.

    Returns:
        uint8[..., count].
    """
    if _WORD % bits == 0 and bits <= 8:
        codes = octets_of(words).flatten(-2)
        if bits < 8:
            shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
            codes = ((codes.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)
        return codes[..., :count]
    # Each code lies within two neighbouring words.
    starts = torch.arange(count) * bits
    wide = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
    first = starts // _WORD
    pairs = wide[..., first] | (wide[..., first + 1] << _WORD)
    found: Tensor = (pairs >> (starts % _WORD)) & (2**bits - 1)
    return found.to(torch.uint8)


def octets_of(words: Tensor) -> Tensor:
    """uint8[..., 4] of int32[...], the lowest first."""
    # The flat view has stride 1 even where an axis of size 1 has another one.
    return words.contiguous().flatten().view(torch.uint8).view(*words.shape, 4)


def packed(codes: Tensor, bits: int) -> Tensor:
    """The inverse of `unpacked`, for 4 and 8 bits.

    Args:
        codes: uint8[..., count].
        bits: of a code.

    Returns:
        int32[..., ceil(count * bits / 32)], with zeros after the last code.
    """
    missing = -codes.shape[-1] % (_WORD // bits)
    codes = torch.nn.functional.pad(codes, (0, missing)) if missing else codes.contiguous()
    if bits == 4:
        codes = codes[..., ::2] | (codes[..., 1::2] << 4)
    return codes.view(torch.int32)


def equal_or_all(zeros: Tensor) -> Tensor | int:
    """The common value of all zero points, or the zero points themselves if they differ."""
    first = int(zeros.flatten()[0])
    return first if bool((zeros == first).all()) else zeros


def order_of_groups(groups: Tensor, group: int) -> Tensor | None:
    """An order of inputs in which the inputs of each group are consecutive, as `QuantizedWeight.order`.

    Args:
        groups: int32[K], the group of each input.
        group: the size of each group; the last one may have fewer inputs.

    Returns:
        int64[K]; None if inputs are in this order already.

    Raises:
        LoadError: groups have other sizes.
    """
    in_order = torch.arange(len(groups)) // group
    if torch.equal(groups.long(), in_order):
        return None
    ordered, order = groups.long().sort(stable=True)
    if not torch.equal(ordered, in_order):
        raise LoadError(f"the weights are damaged: g_idx does not have {group} inputs in each group")
    return order
