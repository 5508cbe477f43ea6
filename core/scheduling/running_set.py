"""The running sequences: their rows, and which phase each is in."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from penstock.core.sequences.sequence import Sequence
from penstock.core.steps.plan_builder import DecodeBatch


class RunningSet:
    """Rows 0 .. max_num_seqs-1 and the sequences in them.

    A sequence enters as a prefill, is a decode from its first launched sample on, and drains once
    its last sample is launched. (Dicts serve as ordered sets: batch order is the order of entry.)
    """

    __slots__ = (
        "_batches", "_free_rows", "_next_part", "_num_parts", "decodes", "draining", "freed_rows", "num_entered",
        "num_left", "prefills", "rows_of",
    )  # fmt: skip

    def __init__(self, max_num_seqs: int, num_parts: int = 1) -> None:
        """The decodes are in `num_parts` disjoint parts; each plan takes one part."""
        self._free_rows = list(range(max_num_seqs))
        heapify(self._free_rows)
        self.prefills: dict[Sequence, None] = {}
        self.decodes: dict[Sequence, None] = {}
        self.draining: dict[Sequence, None] = {}
        self.freed_rows: list[int] = []  # since the last plan
        self.num_entered = 0  # ever
        self.num_left = 0  # ever
        self.rows_of: dict[str, dict[str, int]] = {}  # by tenant and group
        self._batches: list[DecodeBatch | None] = [None] * num_parts
        self._num_parts = num_parts
        self._next_part = 0

    def __len__(self) -> int:
        return len(self.prefills) + len(self.decodes) + len(self.draining)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.decodes
        yield from self.prefills
        yield from self.draining

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def free_rows(self) -> list[int]:
        return sorted(self._free_rows)

    def enter(self, seq: Sequence) -> None:
        """Give the sequence the lowest free row, in a new epoch."""
        seq.row = heappop(self._free_rows)
        seq.epoch += 1
        seq.running_epoch = seq.epoch
        seq.request.running.append(seq)
        self.prefills[seq] = None
        self.num_entered += 1
        groups = self.rows_of.setdefault(seq.request.tenant, {})
        groups[seq.request.group] = groups.get(seq.request.group, 0) + 1

    def leave(self, seq: Sequence) -> None:
        """Take the row back and forget what belonged to it. Results in flight no longer apply."""
        if seq in self.decodes:
            del self.decodes[seq]
            self._forget_batch(seq)
        elif seq in self.prefills:
            del self.prefills[seq]
        else:
            del self.draining[seq]
        self.num_left += 1
        groups = self.rows_of[seq.request.tenant]
        groups[seq.request.group] -= 1
        if not groups[seq.request.group]:
            del groups[seq.request.group]
            if not groups:
                del self.rows_of[seq.request.tenant]
        heappush(self._free_rows, seq.row)
        self.freed_rows.append(seq.row)
        seq.request.running.remove(seq)
        seq.clear()

    def to_decode(self, seq: Sequence) -> None:
        """The sequence's first sample is launched, or drafts assumed to be its last were rejected."""
        del (self.prefills if seq in self.prefills else self.draining)[seq]
        self.decodes[seq] = None
        self._forget_batch(seq)

    def to_draining(self, seq: Sequence) -> None:
        """The sequence's last sample is launched; only results are missing."""
        del self.decodes[seq]
        self.draining[seq] = None
        self._forget_batch(seq)

    def decode_batch(self) -> DecodeBatch:
        """Return the decodes for the next plan: those of the part whose turn it is.

        The same object as long as no sequence joins or leaves the part. With one part, each step waits for the one
        before it. With more, consecutive steps have no row in common, so each stage of a pipeline can hold one.
        """
        part = self._next_part
        batch = self._batches[part]
        num_parts = self._num_parts
        if batch is None:
            seqs = self.decodes if num_parts == 1 else (seq for seq in self.decodes if seq.row % num_parts == part)
            batch = self._batches[part] = DecodeBatch(list(seqs))
        if num_parts > 1:
            self._next_part = (part + 1) % num_parts
        return batch

    def _forget_batch(self, seq: Sequence) -> None:
        self._batches[seq.row % self._num_parts] = None
