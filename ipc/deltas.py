"""A TokenBatch read row by row."""

from collections.abc import Iterable, Iterator
from itertools import accumulate, chain

from penstock.ipc.codec import MalformedMessage
from penstock.ipc.int32_buffer import unpack_int32
from penstock.ipc.messages import SequenceDelta, TokenBatch


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
