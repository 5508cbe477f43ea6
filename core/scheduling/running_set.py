"""The running sequences: which have a row, and whether they compute prompts, decode, or are about to end."""

from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from heapq import heapify, heappop, heappush

from penstock.core.scheduling.decode_parts import DecodeParts
from penstock.core.scheduling.policy import Policy
from penstock.core.sequences.sequence import Sequence
from penstock.core.steps.plan_builder import DecodeBatch


class RunningSet:
    """Rows 0 .. max_num_seqs-1 and the sequences in them.

    A sequence enters as a prefill, is a decode from its first launched sample on, and drains once
    its last sample is launched. (Dicts serve as ordered sets: batch order is the order of entry.)
    """

    __slots__ = (
        "_batch", "_decode_parts", "_free_rows", "_held_back", "decodes", "draining", "freed_rows", "giving_way",
        "num_entered", "num_left", "num_parts", "prefills", "rows_of",
    )  # fmt: skip

    def __init__(self, max_num_seqs: int, num_parts: int = 1) -> None:
        """Each plan takes the decodes of one of `num_parts` parts."""
        self._free_rows = list(range(max_num_seqs))
        heapify(self._free_rows)
        self.prefills: dict[Sequence, None] = {}
        self.decodes: dict[Sequence, None] = {}
        self.draining: dict[Sequence, None] = {}
        self.giving_way: dict[Sequence, None] = {}  # the running ones that lose their rows first
        self._held_back: ListOf[Sequence] = []
        self.freed_rows: list[int] = []  # since the last plan
        self.num_entered = 0  # ever
        self.num_left = 0  # ever
        self.rows_of: dict[str, dict[str, int]] = {}  # by tenant and group
        self._batch: DecodeBatch | None = None  # of all decodes
        self.num_parts = num_parts
        self._decode_parts = DecodeParts(num_parts) if num_parts > 1 else None

    def __len__(self) -> int:
        return len(self.prefills) + len(self.decodes) + len(self.draining)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.decodes
        yield from self.prefills
        yield from self.draining

    @property
    def num_pending(self) -> int:
        """Known tokens of the prefills that are still to be computed."""
        return sum(seq.num_tokens - seq.num_computed_tokens for seq in self.prefills)

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
        if seq.request.gives_way:
            self.giving_way[seq] = None
        self.num_entered += 1
        groups = self.rows_of.setdefault(seq.request.tenant, {})
        groups[seq.request.group] = groups.get(seq.request.group, 0) + 1

    def leave(self, seq: Sequence) -> None:
        """Take the row back and forget what belonged to it. Results in flight no longer apply."""
        if seq in self.decodes:
            self._decodes_no_more(seq)
        elif seq in self.prefills:
            del self.prefills[seq]
        else:
            del self.draining[seq]
        self.giving_way.pop(seq, None)
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
        self._batch = None
        if self._decode_parts is not None:
            self._decode_parts.join(seq)

    def to_draining(self, seq: Sequence) -> None:
        """The sequence's last sample is launched; only results are missing."""
        self._decodes_no_more(seq)
        self.draining[seq] = None

    def decode_batch(self) -> DecodeBatch:
        """Return the decodes for the next plan; the same object until a sequence joins or leaves."""
        if self._decode_parts is not None:
            return self._decode_parts.next_batch()
        if self._batch is None:
            seqs = list(self.decodes)
            if self._held_back:
                held = dict.fromkeys(self._held_back)
                seqs = [seq for seq in seqs if seq not in held]
            self._batch = DecodeBatch(seqs)
        return self._batch

    def hold_back(self, seqs: ListOf[Sequence]) -> None:
        """Let these, and no others, keep their rows without decoding from now on (with pipeline stages, all decode)."""
        if seqs != self._held_back:
            self._held_back = seqs
            self._batch = None

    def victim(self, policy: Policy) -> Sequence:
        """Return the sequence that loses its row first, if possible one that gives way. At least one must run."""
        return policy.victim(self.giving_way or self)

    def _decodes_no_more(self, seq: Sequence) -> None:
        del self.decodes[seq]
        self._batch = None
        if self._decode_parts is not None:
            self._decode_parts.leave(seq)
