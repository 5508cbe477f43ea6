"""One step: its sequences, the columns that the worker gets, and the owners of the tokens that come back."""

from array import array
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from collections.abc import Set as AbstractSet
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from msgspec import Struct

from penstock.core.kv.kv_pages import KVPages, NewPage
from penstock.core.sequences.sequence import Owner, Sequence
from penstock.core.steps.drafts import DraftColumns
from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import NewRow, RowImage, StepPlan, TokenColumns

PaceInputs = tuple[float, float, float, float, float]
"""The inputs of a step's predicted time (`prefill_pace.py`)."""


class _Members(NamedTuple):
    """The sequences of one owner in a batch."""

    positions: list[int]
    request_ids: tuple[str, ...]
    sequence_idxs: bytes  # int32


class Audience:
    """The owners of a batch's sequences. Made once for all steps in which the batch stays the same."""

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
            token_ids: int32[at least as many as the batch returns], in batch order.
            apart: positions that are reported separately, or not at all.
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
                numbers = memoryview(token_ids).cast("i")  # raw: they are only reordered
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
    """Sequences that compute their next token, in batch order; never changed after creation.

    While no sequence joins or leaves, all steps in flight and the next ones share it.
    """

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
    num_prompt_logprobs: int  # number of its first positions for which the result scores the next prompt token


class InFlightStep(Struct, frozen=True):
    """What is needed to apply a step's result, in the order of the plan's rows: decodes, then chunks."""

    step_id: int
    decodes: DecodeBatch
    chunks: list[Chunk]
    num_samples: int
    num_left: int  # sequences that had left the running set when it was planned
    has_logprobs: bool  # for some output or prompt token
    num_drafts: ListOf[int] = ()  # most of each decode; empty: none
    predicted: tuple[PaceInputs, int] | None = None  # the step's parts and expected microseconds (0: unknown)
    starts: bytes = b""  # int32[at least as many as there are decodes]: the decodes' positions
    num_context: int = 0  # sum of these positions
    is_whole: bool = False  # the step computes one token of each running decode
    num_pooled: int = 0  # vectors due from chunks that sample

    @property
    def decode_sizes(self) -> list[int]:
        """Most positions that each decode computes."""
        return [1 + count for count in self.num_drafts] if self.num_drafts else [1] * len(self.decodes.seqs)

    @property
    def num_tokens(self) -> int:
        """Most positions that the step computes."""
        return len(self.decodes.seqs) + sum(self.num_drafts) + sum(chunk.num_new for chunk in self.chunks)


def _row_images(seq: Sequence) -> tuple[RowImage, ...]:
    ids, start = seq.request.embedding_ids, seq.num_computed_tokens
    return tuple(
        RowImage(
            image.key, image.start, image.length, image.num_embeddings, image.grid,
            ids[image.key] if image.start + image.length > start else 0,
        )
        for image in seq.request.images
    )  # fmt: skip


Pages = tuple[list[int], list[NewPage]]
"""New pages of a sequence, as `KVPages.grow` returns them."""


class PlanBuilder:
    """Collects the parts of one plan besides its decodes."""

    __slots__ = (
        "_new_pages", "_new_rows", "_window_pages", "chunks", "drafts", "has_logprobs", "num_pooled",
    )  # fmt: skip

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.drafts: DraftColumns | None = None  # None: no decode has any, and all starts are exact
        self.has_logprobs = False  # of some chunk
        self.num_pooled = 0  # chunks that end with a vector
        self._new_pages: list[tuple[Sequence, int]] = []
        self._new_rows: list[NewRow] = []
        self._window_pages: list[tuple[Sequence, int, NewPage]] = []

    def append_page(self, seq: Sequence, page_id: int) -> None:
        self._new_pages.append((seq, page_id))

    def add_pages(self, seq: Sequence, page_ids: Iterable[int], window_pages: Iterable[NewPage]) -> None:
        """Add a sequence's new pages of all groups, as `KVPages.grow` returns them."""
        self._new_pages += [(seq, page_id) for page_id in page_ids]
        self._window_pages += [(seq, seq.epoch, page) for page in window_pages]

    def take_pages(self, seq: Sequence) -> Pages:
        """Take back the pages that `add_pages` got for a sequence."""
        mine = [page_id for its, page_id in self._new_pages if its is seq]
        windows = [page for its, _, page in self._window_pages if its is seq]
        self._new_pages = [each for each in self._new_pages if each[0] is not seq]
        self._window_pages = [each for each in self._window_pages if each[0] is not seq]
        return mine, windows

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
                seq.request.cache_salt,
                _row_images(seq) if seq.request.images else (),
                seq.request.adapter_id,
                seq.sampler_state,
            )
        )

    def add_next_chunk(self, seq: Sequence, budget: int) -> int:
        """Launch the next known tokens of the sequence, at most `budget`; return how many."""
        start = seq.num_computed_tokens
        remaining = seq.num_tokens - start
        num_new = min(remaining, budget)
        samples = num_new == remaining
        # Log-probabilities owed when a row starts stay due until the chunk with the last of them has returned.
        num_prompt_logprobs = max(0, min(start + num_new, seq.num_prompt_logprobs_due) - start)
        if not seq.owes_prompt_logprobs:
            num_prompt_logprobs = 0
        self.chunks.append(Chunk(seq, seq.epoch, start, num_new, samples, num_prompt_logprobs))
        if num_prompt_logprobs or (samples and seq.num_logprobs >= 0):
            self.has_logprobs = True
        if samples and seq.request.sampling.pooling is not None:
            self.num_pooled += 1
        seq.num_computed_tokens = start + num_new
        return num_new

    def add_drafts(self, lengths: ListOf[int], decodes: DecodeBatch, kv: KVPages, *, is_awaited: bool) -> list[int]:
        """Launch positions beyond the decodes' own, up to `lengths` of each; return how many (empty: none).

        No sequence is preempted for their pages, and none gets more than its request allows. `is_awaited`: a step with
        some is in flight, so that starts may be bounds.
        """
        if not lengths and not is_awaited:
            return []
        counts: list[int] = []
        start_bounds = bytearray()
        lengths = lengths or [0] * len(decodes.seqs)
        for seq, length in zip(decodes.seqs, lengths, strict=True):
            start_bounds.append(seq.num_unsure_tokens > 0)
            start = seq.num_computed_tokens
            end = min(start + length, seq.max_computed_tokens)
            if 0 <= seq.request.sampling.max_drafts < length:
                end = min(end, start + seq.request.sampling.max_drafts)
            if kv.windows and end > seq.launch_limit:
                self.add_pages(seq, *kv.grow(seq, end))
            while not kv.windows and end > seq.launch_limit and kv.pool.num_free:
                self.append_page(seq, kv.append_page(seq))
            num_drafts = max(0, min(end, seq.launch_limit) - start)
            counts.append(num_drafts)
            if num_drafts:
                seq.num_computed_tokens += num_drafts
                seq.num_unsure_tokens += 1 + num_drafts
        if any(start_bounds) or any(counts):
            self.drafts = DraftColumns(counts, bytes(start_bounds))
        return counts if any(counts) else []

    def build(
        self, step_id: int, decodes: DecodeBatch, decode_starts: list[int], freed: list[int], kv: KVPages
    ) -> StepPlan:
        """Return the plan, with the copies due. It leaves out pages of sequences preempted later in this step.

        `freed`: rows that no longer hold a sequence.
        """
        chunks, new_rows = self.chunks, tuple(self._new_rows)
        rows, start, num_new, samples = decodes.rows, pack_int32(decode_starts), decodes.num_new, decodes.samples
        num_drafts = start_bounds = b""
        if self.drafts is not None:
            counts, start_bounds = self.drafts
            num_new = pack_int32([1 + count for count in counts])
            num_drafts = pack_int32(counts) + bytes(4 * len(chunks))
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
            if self.drafts is not None:  # a row may have got several pages
                pages.sort(key=itemgetter(0))  # stable: its pages stay in order
                counts = list(Counter(row for row, _ in pages).values())
            page_rows = pack_int32(dict.fromkeys([row for row, _ in pages]))
            page_counts = pack_int32(counts)
            page_ids = pack_int32([page_id for _, page_id in pages])
        copy_src, copy_dst, copy_tiers = kv.copies.take() if kv.copies.src else (b"", b"", b"")
        state_loads, state_saves = kv.snapshots.take() if kv.snapshots is not None else (b"", b"")
        freed_rows = pack_int32(freed) if freed else b""
        window_pages = self._packed_window_pages() if self._window_pages else b""
        # Keywords would cost half a microsecond. Each argument has its field's name instead, which a test compares.
        return StepPlan(
            step_id, rows, start, num_new, samples, new_rows, page_rows, page_counts, page_ids, copy_src, copy_dst,
            freed_rows, window_pages, num_drafts, start_bounds, copy_tiers, state_loads, state_saves,
        )  # fmt: skip

    def _packed_window_pages(self) -> bytes:
        return pack_int32(
            number
            for seq, epoch, page in self._window_pages
            if seq.running_epoch == epoch
            for number in (page.group, seq.row, page.place, page.page_id)
        )
