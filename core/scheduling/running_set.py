"""The running sequences: their rows, and which phase each is in."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from penstock.core.sequences.sequence import Sequence
from penstock.core.steps.plan_builder import DecodeBatch


class RunningSet:
    """Rows 0 .. max_num_seqs-1 and who is in them.

    A sequence enters as a prefill, is a decode from its first launched sample on, and drains once
    its last sample is launched. (Dicts serve as ordered sets: batch order is the order of entry.)
    """

    __slots__ = (
        "_batch", "_free_rows", "decodes", "draining", "freed_rows", "num_entered", "num_left", "prefills", "rows_of",
    )  # fmt: skip

    def __init__(self, max_num_seqs: int) -> None:
        self._free_rows = list(range(max_num_seqs))
        heapify(self._free_rows)
        self.prefills: dict[Sequence, None] = {}
        self.decodes: dict[Sequence, None] = {}
        self.draining: dict[Sequence, None] = {}
        self.freed_rows: list[int] = []  # since the last plan
        self.num_entered = 0  # ever
        self.num_left = 0  # ever
        self.rows_of: dict[str, dict[str, int]] = {}  # by tenant and group
        self._batch: DecodeBatch | None = None

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
            self._batch = None
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
        """The sequence's first sample is launched."""
        del self.prefills[seq]
        self.decodes[seq] = None
        self._batch = None

    def to_draining(self, seq: Sequence) -> None:
        """The sequence's last sample is launched; only results are awaited."""
        del self.decodes[seq]
        self.draining[seq] = None
        self._batch = None

    def decode_batch(self) -> DecodeBatch:
        """Return the decodes as a batch; the same object while nobody joins or leaves."""
        if self._batch is None:
            self._batch = DecodeBatch(list(self.decodes))
        return self._batch
