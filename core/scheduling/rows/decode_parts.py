"""Which decodes a plan takes: those of one of several disjoint parts in turn.

Each stage of a pipeline computes another plan at the same time. Plans that overlap must have no row in common, because
a row's next token is known only when the last stage has drawn the one before it. So there are as many parts as stages.
"""

from penstock.core.sequences.sequence import Sequence
from penstock.core.steps.plan_builder import DecodeBatch


class DecodeParts:
    """Decodes by part, of which there are at least two. All are equally large, give or take one sequence."""

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
            # The next plan with it may have to wait for its last token, but only that one.
            moved = next(reversed(self._members[largest]))
            self._take(moved)
            self._put(moved, part)

    def next_batch(self) -> DecodeBatch:
        """Return the decodes of the part whose turn it is; parts that are empty have none.

        The same object as long as no sequence joins or leaves the part.
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
