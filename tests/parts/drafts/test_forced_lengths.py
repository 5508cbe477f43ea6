"""Guesses are asked for where the worker has said that tokens are forced, and nowhere else."""

from penstock.core.steps.drafts import DraftRoom
from penstock.parts.drafts.scheduler.forced_lengths import ForcedLengths
from penstock.parts.drafts.scheduler.lengths import FixedLengths
from tests.parts.drafts.test_draft_lengths import make_rows


def test_as_many_as_are_forced_and_there_is_room_for() -> None:
    rows = make_rows(4)
    for i, seq in enumerate(rows):
        seq.row, seq.num_computed_tokens = i, 3  # all of the prompt
    lengths = ForcedLengths(FixedLengths(2), 8, are_only_forced=True)
    room = DraftRoom(100, 12)
    assert lengths.lengths(rows, room) == ()
    lengths.forced(rows[1], 5)
    lengths.forced(rows[3], 20)
    assert lengths.lengths(rows, room) == [0, 5, 0, 8]
    assert lengths.lengths(rows, DraftRoom(7, 12)) == [0, 5, 0, 2]
    rows[1].num_computed_tokens += 3  # some of them are in flight
    assert lengths.lengths(rows, room) == [0, 2, 0, 8]
    rows[1].num_computed_tokens += 2
    assert lengths.lengths(rows, room) == [0, 0, 0, 8]
    rows[3].row = -1
    assert lengths.lengths(rows, room) == ()


def test_others_say_more_or_less() -> None:
    rows = make_rows(2)
    for i, seq in enumerate(rows):
        seq.row, seq.num_computed_tokens = i, 3
    lengths = ForcedLengths(FixedLengths(2), 8, are_only_forced=False)
    assert lengths.lengths(rows, DraftRoom(100, 6)) == [2, 2]
    lengths.forced(rows[1], 5)
    assert lengths.lengths(rows, DraftRoom(100, 6)) == [2, 5]
    assert lengths.lengths(rows, DraftRoom(5, 6)) == [2, 3]
    assert lengths.lengths(rows, DraftRoom(3, 6)) == [2, 1]
