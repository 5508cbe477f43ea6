"""Messages to bytes and back, and the columns of numbers in them. Never pickle."""

import sys
from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain
from typing import Any, Generic, TypeVar

import msgspec

from penstock.ipc.messages import Message, SequenceDelta, TokenBatch

In = TypeVar("In")
_SWAP = sys.byteorder == "big"


class MalformedMessage(ValueError):
    """Bytes that are not a message of the expected kinds, or a message that is invalid from this sender.

    The channel drops and counts them.
    """


class Codec(Generic[In]):
    """Encodes any `Message`; decodes and validates messages of the types in `incoming` (a union).

    There is one for each direction of a channel.
    """

    def __init__(self, incoming: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)

    def encode(self, message: Message) -> bytes:
        return self._encoder.encode(message)

    def decode(self, frame: bytes | memoryview) -> In:
        """
        Raises:
            MalformedMessage: if the frame is not one of the incoming messages.
        """
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedMessage(str(error)) from None


def pack_int32(values: Iterable[int]) -> bytes:
    """Return the values as int32[len(values)], little-endian.

    Raises:
        OverflowError: a value does not fit 32 bits.
    """
    buffer = array("i", values)
    if _SWAP:
        buffer.byteswap()
    return buffer.tobytes()


def unpack_tokens(buffer: bytes) -> list[int]:
    """Return int32 values, read as unsigned, so that a negative number becomes larger than any vocabulary.

    Raises:
        TypeError: the length is not a multiple of 4 bytes.
    """
    view = memoryview(buffer)
    if _SWAP:
        view = memoryview(unpack_int32(buffer)).cast("B")
    return view.cast("I").tolist()


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


def unpack_uint64(buffer: bytes) -> "array[int]":
    """Return uint64 values from a little-endian buffer.

    Raises:
        ValueError: the length is not a multiple of 8 bytes.
    """
    values = array("Q")
    values.frombytes(buffer)
    if _SWAP:
        values.byteswap()
    return values


def deltas_of(batch: TokenBatch) -> Iterator[SequenceDelta]:
    """Yield all rows of a batch as deltas: first its own deltas, then its columns.

    Raises:
        MalformedMessage: before the first delta, if the columns differ in length.
    """
    columns = batch.columns
    if columns is None:
        return iter(batch.deltas)
    num_rows, num_tokens = len(columns.request_ids), columns.num_tokens
    counts = unpack_int32(num_tokens) if num_tokens and len(num_tokens) == 4 * num_rows else None
    num_due = sum(counts) if counts else num_rows
    has_counts = not num_tokens or (counts is not None and min(counts) > 0)
    if not has_counts or len(columns.sequence_idxs) != 4 * num_rows or len(columns.token_ids) != 4 * num_due:
        raise MalformedMessage(f"token columns of {num_rows} sequences differ in length")
    token_ids = unpack_int32(columns.token_ids)
    tokens: Iterable[tuple[int, ...]] = zip(token_ids, strict=True)
    if counts:
        tokens = (tuple(token_ids[end - count : end]) for count, end in zip(counts, accumulate(counts), strict=True))
    deltas = map(SequenceDelta, columns.request_ids, unpack_int32(columns.sequence_idxs), tokens)
    return chain(batch.deltas, deltas)
