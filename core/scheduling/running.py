"""Who has a row: the running sequences, and the admission of waiting ones.

Admission decides which waiting sequences enter a row in this step. It never preempts a sequence.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from penstock.core.kv.kv_pages import KVPages, Start, find_start, is_sibling_ready
from penstock.core.scheduling.grammar_gate import GrammarGate
from penstock.core.scheduling.stats import Totals
from penstock.core.scheduling.step_record import Admission
from penstock.core.scheduling.suspects import Suspects
from penstock.core.sequences.sequence import Request, Sequence
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.core.steps.plan_builder import DecodeBatch, PlanBuilder
from penstock.core.steps.prefill_pace import Room


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


class Admissions:
    """Moves sequences from waiting to running, in policy order, while budget, rows and pages last."""

    __slots__ = (
        "_blocked", "_favoured", "_grammars", "_is_held", "_kv", "_newcomers", "_running", "_suspects", "_totals",
        "_waiting",
    )  # fmt: skip

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningSet,
        kv: KVPages,
        totals: Totals,
        suspects: Suspects,
        grammars: GrammarGate,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._kv = kv
        self._totals = totals
        self._suspects = suspects
        self._grammars = grammars
        self._newcomers: list[Sequence] = []
        self._is_held = False
        self._favoured: Sequence | None = None  # others were preempted for it: it need not wait until one leaves
        self._blocked: tuple[Sequence, int] | None = None  # the head that lacked pages, and how many it needs

    def hold(self) -> None:
        """Admit nothing until a sequence has left, because one was preempted. Otherwise sequences that do
        not fit together would take turns at being preempted and recomputed."""
        self._is_held = True

    @property
    def is_held(self) -> bool:
        """Whether nothing is admitted until a sequence has left."""
        return self._is_held

    def take_newcomers(self) -> list[Sequence]:
        """Return the sequences that got their first row since the last call."""
        newcomers, self._newcomers = self._newcomers, []
        return newcomers

    def favour(self, seq: Sequence) -> None:
        """Sequences were preempted for this one."""
        self._favoured = seq
        self._blocked = None

    def lacks_room(self, seq: Sequence) -> bool | None:
        """Tell whether there is no row, or not enough pages, for the head of the queue; None if it waits otherwise."""
        if self._suspects.groups and not self._suspects.may_run(seq.request):
            return None
        start = find_start(seq, self._kv)
        if start is None:
            return None
        if not self._running.num_free_rows:
            return True
        kv = self._kv
        cursor = kv.hold(seq.request.namespace, start.hit)
        num_available = kv.num_available
        kv.drop(cursor, start.hit)
        return num_available - self._headroom() < self._num_new_pages(seq, start)

    def sequence_left(self) -> None:
        """A sequence has ended: there may be room now, and another head."""
        self._is_held = False
        self._blocked = None

    def admit(self, builder: PlanBuilder, room: Room, admitted: list[Admission], *, is_stalled: bool) -> str:
        """Admit what fits and add it to `admitted`; return why the next one waits ("" if none does).

        `is_stalled`: a running sequence already lacks a page.
        """
        waiting = self._waiting
        suspects = self._suspects if self._suspects.groups else None
        for request in waiting.parked():
            if suspects is not None and not suspects.may_run(request):
                self._give_up_grammar(request)
            elif is_sibling_ready(request):
                waiting.unpark(request)
        while (seq := waiting.head()) is not None:
            if room.tokens_from(0) <= 0:
                return "token budget"
            if not self._running.num_free_rows:
                return "no free row"
            if is_stalled or self._lacks_pages_still(seq):
                return "no free pages"
            if self._is_held and len(self._running) and seq is not self._favoured:
                return "no free pages since a preemption"
            may_run = suspects is None or suspects.may_run(seq.request)
            start = find_start(seq, self._kv) if may_run else None
            if start is None:
                waiting.park(seq.request)
                if not may_run:
                    self._give_up_grammar(seq.request)
                continue
            if seq.request.sampling.grammar and not self._grammars.admits(seq.request):
                continue
            if not self._enter(seq, start, builder):
                return "no free pages"
            admitted.append(
                Admission(seq.request_id, seq.sequence_idx, seq.row, seq.num_tokens, start.num_tokens, start.is_fork)
            )
            start_at = seq.num_computed_tokens
            budget = max(1, room.tokens_from(start_at))
            builder.add_pages(seq, *self._kv.grow(seq, min(start_at + budget, seq.num_tokens)))
            room.use(start_at, builder.add_next_chunk(seq, min(budget, seq.launch_limit - start_at)))
        return ""

    def _num_new_pages(self, seq: Sequence, start: Start) -> int:
        """Pages of the first group for all known tokens, and one per group with a window: more come with chunks."""
        return self._kv.pages_for(seq.num_tokens) - len(start.page_ids) + len(self._kv.windows)

    def _give_up_grammar(self, request: Request) -> None:
        """The request waits until others were tried, which may need its grammar's room: it asks again in its turn."""
        if request.grammar_id and not request.running:
            self._grammars.leave(request)

    def _headroom(self) -> int:
        """Pages kept free for the running rows, so that a new sequence is not preempted for their next tokens."""
        sizes = (self._kv.page_size, *(group.page_size for group in self._kv.windows))
        pages_per_row = sum(max(1, 16 // size) for size in sizes)
        return min(len(self._running) * pages_per_row, self._kv.pool.num_pages // 8)

    def _lacks_pages_still(self, seq: Sequence) -> bool:
        # Saves looking up the head's prefix again in each step in which it cannot be admitted anyway.
        blocked = self._blocked
        return blocked is not None and blocked[0] is seq and self._kv.num_available - self._headroom() < blocked[1]

    def _enter(self, seq: Sequence, start: Start, builder: PlanBuilder) -> bool:
        """Give a waiting sequence a row, and pages for all tokens known now, if there are enough."""
        kv = self._kv
        num_available = kv.num_available
        cursor = kv.hold(seq.request.namespace, start.hit)
        num_held = num_available - kv.num_available  # pages of the hit that could have been evicted
        num_new_pages = self._num_new_pages(seq, start)
        if kv.num_available - self._headroom() < num_new_pages:
            kv.drop(cursor, start.hit)
            self._blocked = (seq, num_new_pages + num_held)
            return False
        self._blocked = None
        if seq is self._favoured:
            self._favoured = None
        else:
            self._is_held = False
        kv.pool.share(start.page_ids)
        kv.reserve(num_new_pages)
        self._waiting.admit(seq)
        seq.own_token_ids()
        seq.page_ids = start.page_ids + kv.pool.allocate(num_new_pages - len(kv.windows))
        seq.window_tables = kv.window_tables(start.hit)
        seq.cache_node = cursor
        seq.num_tree_pages = len(start.hit.page_ids)
        seq.num_computed_tokens = start.num_tokens
        seq.num_unsettled_tokens = seq.num_tokens - start.num_tokens
        kv.limit_launch(seq)
        self._running.enter(seq)
        builder.add_row(seq)
        if start.copy_src >= 0:
            builder.copy_page(start.copy_src, seq.page_ids[len(start.page_ids)])
        if seq.num_cached_tokens < 0:
            seq.num_cached_tokens = start.num_tokens
            self._newcomers.append(seq)
            self._totals.num_admitted += 1
            self._totals.num_prompt_tokens += seq.request.num_prompt_tokens
            self._totals.num_cached_tokens += start.num_tokens
        return True
