"""One step: who is in it, the columns that the worker gets, and whose the tokens are that come back."""

from array import array
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from collections.abc import Set as AbstractSet
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from penstock.core.kv.kv_pages import KVPages, NewPage
from penstock.core.sequences.sequence import Owner, Sequence
from penstock.core.steps.drafts import Drafter, Drafts
from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import NewRow, StepPlan, TokenColumns

Parts = tuple[float, float, float, float, float]
"""The inputs of a step's predicted time (`prefill_pace.py`)."""


class _Members(NamedTuple):
    """An owner's sequences in a batch."""

    positions: list[int]
    request_ids: tuple[str, ...]
    sequence_idxs: bytes  # int32


class Audience:
    """The owners of a batch's sequences. Made once, for all steps in which the batch stays the same."""

    __slots__ = ("_members", "_seqs")

    def __init__(self, seqs: list[Sequence]) -> None:
        self._seqs = seqs
        positions: dict[Owner, list[int]] = {}
        for position, seq in enumerate(seqs):
            positions.setdefault(seq.owner, []).append(position)
        self._members = {owner: self._choose(chosen) for owner, chosen in positions.items()}

    def columns(self, token_ids: bytes, apart: AbstractSet[int], counts: list[int]) -> dict[Owner, TokenColumns]:
        """Return each owner's columns.

        Args:
            token_ids: int32[at least as many as the batch returns], in its order.
            apart: positions that are reported in another way, or not at all.
            counts: how many tokens each position returns; empty: one each.
        """
        told: dict[Owner, TokenColumns] = {}
        ends = list(accumulate(counts)) if counts else None
        for owner, members in self._members.items():
            if apart and not apart.isdisjoint(members.positions):
                members = self._choose(position for position in members.positions if position not in apart)
            num_tokens = b""
            if ends is not None:
                num_tokens = pack_int32([counts[i] for i in members.positions])
                tokens = b"".join([token_ids[4 * (ends[i] - counts[i]) : 4 * ends[i]] for i in members.positions])
            elif len(members.positions) == len(self._seqs):
                tokens = token_ids[: 4 * len(self._seqs)]
            else:
                numbers = memoryview(token_ids).cast("i")  # raw: they are only rearranged
                tokens = array("i", [numbers[position] for position in members.positions]).tobytes()
            if members.positions:
                told[owner] = TokenColumns(members.request_ids, members.sequence_idxs, tokens, num_tokens)
        return told

    def _choose(self, positions: Iterable[int]) -> _Members:
        chosen = list(positions)
        seqs = [self._seqs[position] for position in chosen]
        idxs = pack_int32([seq.sequence_idx for seq in seqs])
        return _Members(chosen, tuple([seq.request_id for seq in seqs]), idxs)


class DecodeBatch:
    """Sequences that compute their next token, in batch order. Never changed after its creation:
    while no sequence joins or leaves, all steps in flight and the next ones share it."""

    __slots__ = (
        "audience",
        "epochs",
        "has_logprobs",
        "num_new",
        "positions",
        "rows",
        "samples",
        "seqs",
        "stop_token_ids",
        "token_appenders",
    )

    def __init__(self, seqs: list[Sequence]) -> None:
        self.seqs = seqs
        self.epochs = [seq.epoch for seq in seqs]
        self.rows = pack_int32([seq.row for seq in seqs])
        self.num_new = pack_int32([1] * len(seqs))
        self.samples = b"\x01" * len(seqs)
        self.positions = {seq: position for position, seq in enumerate(seqs)}
        self.token_appenders = [seq.append_token for seq in seqs]
        self.audience = Audience(seqs)
        self.has_logprobs = any(seq.num_logprobs >= 0 for seq in seqs)
        self.stop_token_ids = frozenset[int]().union(*{seq.stop_token_ids for seq in seqs})


class Chunk(NamedTuple):
    """Part of a prompt (or of known tokens to recompute) in one step."""

    seq: Sequence
    epoch: int
    start: int
    num_new: int
    samples: bool  # reaches the last known token
    num_prompt_logprobs: int  # for this many of its first positions the result scores the next prompt token


class InFlightStep(NamedTuple):
    """What is needed to apply a step's result; in the order of the plan's rows: decodes, then chunks."""

    step_id: int
    decodes: DecodeBatch
    chunks: list[Chunk]
    num_samples: int
    num_left: int  # sequences that had left the running set when it was planned
    has_logprobs: bool  # of some output or prompt token
    num_drafts: ListOf[int] = ()  # of each decode; empty: none
    predicted: tuple[Parts, int] | None = None  # its parts, and its expected microseconds; 0: unknown

    @property
    def decode_sizes(self) -> list[int]:
        """How many positions each decode computes."""
        return [1 + count for count in self.num_drafts] if self.num_drafts else [1] * len(self.decodes.seqs)

    @property
    def num_tokens(self) -> int:
        """How many positions it computes."""
        return len(self.decodes.seqs) + sum(self.num_drafts) + sum(chunk.num_new for chunk in self.chunks)


class PlanBuilder:
    """Collects the parts of one plan besides its decodes."""

    __slots__ = (
        "_copy_dst", "_copy_src", "_new_pages", "_new_rows", "_window_pages", "chunks", "drafts", "has_logprobs",
    )  # fmt: skip

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.drafts: Drafts | None = None  # None: no decode has any, and all starts are exact
        self.has_logprobs = False  # in some chunk
        self._new_pages: list[tuple[Sequence, int]] = []
        self._new_rows: list[NewRow] = []
        self._window_pages: list[tuple[Sequence, int, NewPage]] = []
        self._copy_src: list[int] = []
        self._copy_dst: list[int] = []

    def append_page(self, seq: Sequence, page_id: int) -> None:
        self._new_pages.append((seq, page_id))

    def add_pages(self, seq: Sequence, page_ids: Iterable[int], window_pages: Iterable[NewPage]) -> None:
        """Pages of all groups for a sequence, as `KVPages.grow` returns them."""
        self._new_pages += [(seq, page_id) for page_id in page_ids]
        self._window_pages += [(seq, seq.epoch, page) for page in window_pages]

    def add_row(self, seq: Sequence) -> None:
        """A sequence enters a row with all tokens known now, and its pages."""
        for group, table in enumerate(seq.window_tables, 1):
            self.add_pages(seq, (), [NewPage(group, table.first + i, page) for i, page in enumerate(table.page_ids)])
        self._new_rows.append(
            NewRow(
                seq.row,
                pack_int32(seq.token_ids),
                seq.request.num_prompt_tokens,
                seq.sampling(),
                pack_int32(seq.page_ids),
                seq.request.grammar_id,
            )
        )

    def copy_page(self, src: int, dst: int) -> None:
        """Copy before the forward pass. No page is both a source and a target in one plan."""
        self._copy_src.append(src)
        self._copy_dst.append(dst)

    def add_next_chunk(self, seq: Sequence, budget: int) -> int:
        """Launch the next known tokens of the sequence, at most `budget`; return how many."""
        start = seq.num_computed_tokens
        remaining = seq.num_tokens - start
        num_new = min(remaining, budget)
        samples = num_new == remaining
        # Log-probabilities owed at a row's start stay due until the chunk with the last of them has returned.
        num_prompt_logprobs = max(0, min(start + num_new, seq.num_prompt_logprobs_due) - start)
        if not seq.owes_prompt_logprobs:
            num_prompt_logprobs = 0
        self.chunks.append(Chunk(seq, seq.epoch, start, num_new, samples, num_prompt_logprobs))
        if num_prompt_logprobs or (samples and seq.num_logprobs >= 0):
            self.has_logprobs = True
        seq.num_computed_tokens = start + num_new
        return num_new

    def add_drafts(self, drafter: Drafter, decodes: DecodeBatch, kv: KVPages, num_tokens: int) -> list[int]:
        """Launch guesses beside the decodes' own tokens, at most `num_tokens`; return how many of each (empty: none).

        No sequence is preempted for their pages.
        """
        counts: list[int] = []
        token_ids: list[int] = []
        start_bounds = bytearray()
        for seq in decodes.seqs:
            start_bounds.append(seq.num_unsure_tokens > 0)
            start = seq.num_computed_tokens
            most = min(num_tokens - len(token_ids), seq.max_computed_tokens - start)
            drafts = drafter.draft(seq)[:most] if most > 0 else ()
            end = start + len(drafts)
            if kv.windows and end > seq.launch_limit:
                self.add_pages(seq, *kv.grow(seq, end))
            while not kv.windows and end > seq.launch_limit and kv.pool.num_free:
                self.append_page(seq, kv.append_page(seq))
            drafts = drafts[: max(0, seq.launch_limit - start)]
            counts.append(len(drafts))
            if drafts:
                token_ids += drafts
                seq.num_computed_tokens += len(drafts)
                seq.num_unsure_tokens += 1 + len(drafts)
        if any(start_bounds) or token_ids:
            self.drafts = Drafts(counts, token_ids, bytes(start_bounds))
        return counts if token_ids else []

    def build(self, step_id: int, decodes: DecodeBatch, decode_starts: list[int], freed_rows: list[int]) -> StepPlan:
        """Return the plan. Pages of a sequence that was preempted later in this step are left out."""
        chunks = self.chunks
        rows, start, num_new, samples = decodes.rows, pack_int32(decode_starts), decodes.num_new, decodes.samples
        num_drafts = draft_token_ids = start_bounds = b""
        if self.drafts is not None:
            counts, token_ids, start_bounds = self.drafts
            num_new = pack_int32([1 + count for count in counts])
            num_drafts, draft_token_ids = pack_int32(counts) + bytes(4 * len(chunks)), pack_int32(token_ids)
            start_bounds += bytes(len(chunks))
        if chunks:
            rows += pack_int32([chunk.seq.row for chunk in chunks])
            start += pack_int32([chunk.start for chunk in chunks])
            num_new += pack_int32([chunk.num_new for chunk in chunks])
            samples += bytes([chunk.samples for chunk in chunks])
        page_rows = page_counts = page_ids = b""
        if self._new_pages:
            pages = [(seq.row, page_id) for seq, page_id in self._new_pages if seq.row >= 0]
            counts = [1] * len(pages)
            if self.drafts is not None:  # a row may have got several
                pages.sort(key=itemgetter(0))  # stable: its pages stay in order
                counts = list(Counter(row for row, _ in pages).values())
            page_rows = pack_int32(dict.fromkeys([row for row, _ in pages]))
            page_counts = pack_int32(counts)
            page_ids = pack_int32([page_id for _, page_id in pages])
        return StepPlan(
            step_id,
            rows,
            start,
            num_new,
            samples,
            tuple(self._new_rows),
            page_rows,
            page_counts,
            page_ids,
            pack_int32(self._copy_src) if self._copy_src else b"",
            pack_int32(self._copy_dst) if self._copy_dst else b"",
            pack_int32(freed_rows) if freed_rows else b"",
            self._packed_window_pages() if self._window_pages else b"",
            num_drafts,
            draft_token_ids,
            start_bounds,
        )

    def _packed_window_pages(self) -> bytes:
        return pack_int32(
            number
            for seq, epoch, page in self._window_pages
            if seq.running_epoch == epoch
            for number in (page.group, seq.row, page.place, page.page_id)
        )
