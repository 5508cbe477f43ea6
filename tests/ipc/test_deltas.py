"""A TokenBatch row by row."""

import pytest

from penstock.ipc.codec import Codec, MalformedMessage, deltas_of, pack_int32
from penstock.ipc.messages import SequenceDelta, ToFrontend, TokenBatch, TokenColumns


def test_columns_follow_what_has_more_to_tell() -> None:
    last = SequenceDelta("a", 1, (7,), "stop", 7)
    sent = TokenBatch(5, (last,), TokenColumns(("a", "b"), pack_int32([0, 3]), pack_int32([8, 1 << 17])))
    codec: Codec[ToFrontend] = Codec(ToFrontend)
    batch = codec.decode(codec.encode(sent))
    assert isinstance(batch, TokenBatch)
    assert list(deltas_of(batch)) == [last, SequenceDelta("a", 0, (8,)), SequenceDelta("b", 3, (1 << 17,))]
    assert list(deltas_of(TokenBatch(5, (last,)))) == [last]


def test_a_sequence_brings_as_many_tokens_as_its_count_says() -> None:
    columns = TokenColumns(("a", "b"), pack_int32([0, 3]), pack_int32([8, 9, 7]), pack_int32([2, 1]))
    assert list(deltas_of(TokenBatch(5, (), columns))) == [SequenceDelta("a", 0, (8, 9)), SequenceDelta("b", 3, (7,))]


@pytest.mark.parametrize(
    "columns",
    [
        TokenColumns(("a",), pack_int32([0]), pack_int32([1, 2])),
        TokenColumns(("a", "b"), pack_int32([0]), pack_int32([1, 2])),
        TokenColumns(("a",), b"\0\0\0", pack_int32([1])),
        TokenColumns((), pack_int32([0]), b""),
        TokenColumns(("a", "b"), bytes(8), pack_int32([1, 2, 3]), pack_int32([1, 1])),
        TokenColumns(("a", "b"), bytes(8), pack_int32([1, 2, 3]), pack_int32([3])),
        TokenColumns(("a", "b"), bytes(8), pack_int32([1, 2, 3]), pack_int32([4, -1])),
        TokenColumns(("a",), bytes(4), pack_int32([1]), b"\0"),
        TokenColumns((), b"", b"", pack_int32([0])),
    ],
)
def test_columns_of_other_lengths_bring_nothing(columns: TokenColumns) -> None:
    with pytest.raises(MalformedMessage, match="differ in length"):
        deltas_of(TokenBatch(5, (SequenceDelta("a", 1, (7,)),), columns))
