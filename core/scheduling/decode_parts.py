"""Which decodes a plan takes: the decodes are split into disjoint parts, which take turns.

The stages of a pipeline compute different plans at the same time. Overlapping plans must not share a row, because a
row's next token needs the previous one, which only the last stage draws. So there are as many parts as stages.
"""

from penstock.core.sequences.sequence import Sequence
from penstock.core.steps.plan_builder import DecodeBatch


class DecodeParts:
    """The decodes in two or more parts, whose sizes differ by at most one sequence."""

    __slots__ = ("_batches", "_members", "_next", "_part_of")

    def __init__(self, num_parts: int) -> None:
        self._members: list[dict[Sequence, None]] = [{} for _ in range(num_parts)]
        self._batches: list[DecodeBatch | None] = [None] * num_parts
        self._part_of: dict[Sequence, int] = {}
        self._next = 0

    def join(self, seq: Sequence) -> None:
        """A sequence has begun to decode."""
        self._put(seq, min(range(len(self._members)), key=self._size))

    def leave(self, seq: Sequence) -> None:
        """A sequence does not decode any more."""
        part = self._take(seq)
        largest = max(range(len(self._members)), key=self._size)
        if len(self._members[largest]) > len(self._members[part]) + 1:
            # The next plan with the moved sequence may have to wait for its last token; later plans do not.
            moved = next(reversed(self._members[largest]))
            self._take(moved)
            self._put(moved, part)

    def next_batch(self) -> DecodeBatch:
        """Return the decodes of the part whose turn it is; an empty part has none.

        Returns the same object as long as no sequence joins or leaves the part.
        """
        members, num_parts = self._members, len(self._members)
        turns = (self._next + i for i in range(num_parts))
        part = next((turn % num_parts for turn in turns if members[turn % num_parts]), self._next)
        self._next = (part + 1) % num_parts
        batch = self._batches[part]
        if batch is None:
            batch = self._batches[part] = DecodeBatch(list(members[part]))
        return batch

    def _put(self, seq: Sequence, part: int) -> None:
        self._batches[part] = None
        self._members[part][seq] = None
        self._part_of[seq] = part

    def _take(self, seq: Sequence) -> int:
        part = self._part_of.pop(seq)
        del self._members[part][seq]
        self._batches[part] = None
        return part

    def _size(self, part: int) -> int:
        return len(self._members[part])
