"""A TokenBatch read row by row."""

from collections.abc import Iterator

from penstock.ipc.codec import MalformedMessage
from penstock.ipc.int32_buffer import unpack_int32
from penstock.ipc.messages import SequenceDelta, TokenBatch


def deltas_of(batch: TokenBatch) -> Iterator[SequenceDelta]:
    """All that a batch brings, as deltas: those that it has, then its columns.

    Raises:
        MalformedMessage: before the first delta, if the columns are not of one length.
    """
    columns = batch.columns
    if columns is None:
        return iter(batch.deltas)
    request_ids = columns.request_ids
    if not len(columns.sequence_idxs) == len(columns.token_ids) == 4 * len(request_ids):
        raise MalformedMessage(f"columns of {len(request_ids)} tokens have other lengths")
    return _rows(batch.deltas, request_ids, columns.sequence_idxs, columns.token_ids)


def _rows(
    deltas: tuple[SequenceDelta, ...], request_ids: tuple[str, ...], sequence_idxs: bytes, token_ids: bytes
) -> Iterator[SequenceDelta]:
    yield from deltas
    tokens = zip(unpack_int32(token_ids), strict=True)
    yield from map(SequenceDelta, request_ids, unpack_int32(sequence_idxs), tokens)
