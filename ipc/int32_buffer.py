"""Integers as they travel in messages: raw little-endian int32 buffers."""

import sys
from array import array
from collections.abc import Iterable

_SWAP = sys.byteorder == "big"


def pack_int32(values: Iterable[int]) -> bytes:
    """Return the values as int32[len(values)], little-endian.

    Raises:
        OverflowError: a value does not fit 32 bits.
    """
    buffer = array("i", values)
    if _SWAP:
        buffer.byteswap()
    return buffer.tobytes()


def unpack_int32(buffer: bytes) -> "array[int]":
    """Return int32 values from a little-endian buffer.

    Raises:
        ValueError: the length is not a multiple of 4 bytes.
    """
    values = array("i")
    values.frombytes(buffer)
    if _SWAP:
        values.byteswap()
    return values
