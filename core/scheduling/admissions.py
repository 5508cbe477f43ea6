"""Which waiting sequences enter a row in a step, with what the running ones leave over. It never preempts."""

from penstock.core.kv.kv_pages import KVPages, Start, find_start, is_sibling_ready
from penstock.core.scheduling.accounts import Accounts
from penstock.core.scheduling.part import Parts
from penstock.core.scheduling.running_set import RunningSet
from penstock.core.scheduling.stats import Totals
from penstock.core.scheduling.step_record import Admission, Blocked
from penstock.core.scheduling.suspects import Suspects
from penstock.core.sequences.sequence import Request, Sequence
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.core.steps.plan_builder import PlanBuilder
from penstock.core.steps.prefill_pace import Room


class Admissions:
    """Moves sequences from waiting to running, in policy order, while budget, rows and pages last."""

    __slots__ = (
        "_accounts",
        "_awaits_departure",
        "_blocked",
        "_favoured",
        "_kv",
        "_parts",
        "_running",
        "_suspects",
        "_totals",
        "_waiting",
    )  # fmt: skip

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningSet,
        kv: KVPages,
        totals: Totals,
        suspects: Suspects,
        accounts: Accounts,
        parts: Parts,
    ) -> None:
        self._accounts = accounts
        self._waiting = waiting
        self._running = running
        self._kv = kv
        self._totals = totals
        self._suspects = suspects
        self._parts = parts
        self._awaits_departure = False
        self._favoured: Sequence | None = None  # others were preempted for it: it need not wait until one leaves
        self._blocked: tuple[Sequence, int] | None = None  # the head that lacked pages, and how many it needs

    def await_departure(self) -> None:
        """Admit nothing until a sequence has left: otherwise sequences that do not fit together take turns forever."""
        self._awaits_departure = True

    @property
    def awaits_departure(self) -> bool:
        """Whether nothing is admitted until a sequence has left."""
        return self._awaits_departure

    def favour(self, seq: Sequence) -> None:
        """Sequences were preempted for this one."""
        self._favoured = seq
        self._blocked = None

    def lacks_room(self, seq: Sequence) -> bool | None:
        """Whether the head of the queue lacks a row or pages; None if it waits for another reason."""
        if self._suspects.groups and not self._suspects.may_run(seq.request):
            return None
        start = find_start(seq, self._kv)
        if start is None:
            return None
        if not self._running.num_free_rows:
            return True
        needed, available = self.room_for(seq, start)
        return available < needed

    def pages_for(self, seq: Sequence) -> tuple[int, int]:
        """Return how many pages the head of the queue needs, and how many it could have now."""
        start = find_start(seq, self._kv)
        return (0, 0) if start is None else self.room_for(seq, start)

    def room_for(self, seq: Sequence, start: Start) -> tuple[int, int]:
        """Return how many pages a sequence that begins there needs, and how many it could have now."""
        kv = self._kv
        cursor = kv.hold(seq.request.namespace, start.hit)
        num_available = kv.num_available
        kv.drop(cursor, start.hit)
        return self._num_new_pages(seq, start), max(0, num_available - self._headroom())

    def sequence_left(self) -> None:
        """A sequence has ended or is paused: there may be room now, and another head."""
        self._awaits_departure = False
        self._blocked = None

    def admit(self, builder: PlanBuilder, room: Room, admitted: list[Admission], *, is_stalled: bool) -> str:
        """Admit what fits and add it to `admitted`; return why the next one waits ("" if none does).

        `is_stalled`: some running sequence lacks a page.
        """
        waiting = self._waiting
        suspects = self._suspects if self._suspects.groups else None
        for request in waiting.parked():
            if suspects is not None and not suspects.may_run(request):
                self._let_others_ask(request)
            elif is_sibling_ready(request):
                waiting.unpark(request)
        while (seq := waiting.head()) is not None:
            if why := self._why_not(seq, room, is_stalled):
                return why
            may_run = suspects is None or suspects.may_run(seq.request)
            start = find_start(seq, self._kv) if may_run else None
            if start is None:
                waiting.park(seq.request)
                if not may_run:
                    self._let_others_ask(seq.request)
                continue
            if not all(admits(seq, start) for admits in self._parts.admits):
                continue  # a part has taken the request out of the queue until what it waits for has come
            first = start.num_tokens
            if self._parts.chunk_end(seq, first, first + 1, first + room.num_tokens) <= first:
                return Blocked.BUDGET  # even the shortest first chunk does not fit
            if not self._enter(seq, start, builder):
                return Blocked.NO_PAGES
            what = seq.num_tokens, start.num_tokens, start.is_fork, len(start.hit.host_page_ids)
            admitted.append(Admission(seq.request_id, seq.sequence_idx, seq.row, *what))
            self._launch_first_chunk(seq, builder, room)
        return ""

    def _why_not(self, seq: Sequence, room: Room, is_stalled: bool) -> str:
        """Why the head of the queue, and with it all others, cannot enter in this step; "": it may."""
        request = seq.request
        for why_not in self._parts.why_not:
            if why := why_not(request, room):
                return why
        if room.tokens_from(0) <= 0:
            return Blocked.BUDGET
        if not self._running.num_free_rows:
            return Blocked.NO_ROW
        if is_stalled or self._lacks_pages_still(seq):
            return Blocked.NO_PAGES
        for why_not_join in self._parts.why_not_join:
            if why := why_not_join(request):
                return why
        if self._awaits_departure and len(self._running) and seq is not self._favoured:
            return Blocked.NO_PAGES_SINCE
        return ""

    def _launch_first_chunk(self, seq: Sequence, builder: PlanBuilder, room: Room) -> None:
        """Launch the first chunk of a sequence that has just entered a row."""
        start = seq.num_computed_tokens
        end = min(start + max(1, room.tokens_for(seq.request, start)), seq.num_tokens)
        end = self._parts.chunk_end(seq, start, end, start + room.num_tokens)
        builder.add_pages(seq, *self._kv.grow(seq, end))
        end = min(end, seq.launch_limit)
        num_tokens = self._parts.chunk_end(seq, start, end, end) - start
        if self._kv.snapshots is not None:
            num_tokens = self._kv.snapshots.chunk(seq, start, num_tokens)
        room.use(seq.request, start, builder.add_next_chunk(seq, num_tokens))

    def has_all_made(self, seq: Sequence) -> bool:
        """Whether the worker has what the head of the queue needs of it; otherwise the head is held, and asked for."""
        asked = self._parts.asked_early
        start = find_start(seq, self._kv) if asked else None
        return start is None or all(admits(seq, start) for admits in asked)

    def _num_new_pages(self, seq: Sequence, start: Start) -> int:
        """Pages of the first group for all known tokens, and one per window group, which gets more with its chunks."""
        kv, first = self._kv, start.num_tokens
        num_fetched = sum(ref < 0 for refs in start.hit.window_page_ids for ref in refs)
        num_new = kv.pages_for(seq.num_tokens) - len(start.page_ids) + len(kv.windows) + num_fetched
        if kv.windows and (num_first := self._parts.chunk_end(seq, first, first + 1, seq.num_tokens) - first) > 1:
            num_new += sum(-(-num_first // group.page_size) for group in kv.windows)  # no shorter chunk is possible
        return num_new

    def _let_others_ask(self, request: Request) -> None:
        """Free what the worker has made for a waiting request, for those tried before it; it asks again in its turn."""
        if not request.running:
            for let_go in self._parts.let_go:
                let_go(request)

    def _headroom(self) -> int:
        """Pages kept free for the running rows' next tokens, so that they do not preempt a new sequence at once."""
        sizes = (self._kv.page_size, *(group.page_size for group in self._kv.windows))
        pages_per_row = sum(max(1, 16 // size) for size in sizes)
        return min(len(self._running) * pages_per_row, self._kv.pool.num_pages // 8)

    def _lacks_pages_still(self, seq: Sequence) -> bool:
        # Saves looking up the head's prefix in every step in which it cannot be admitted anyway.
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
            self._awaits_departure = False
        kv.pool.share(start.page_ids)
        kv.reserve(num_new_pages)
        self._waiting.admit(seq)
        seq.own_token_ids()
        seq.page_ids = start.page_ids + kv.pool.allocate(kv.pages_for(seq.num_tokens) - len(start.page_ids))
        num_fetched = kv.start_with(seq, start.hit, start.num_tokens)
        seq.cache_node = cursor
        seq.num_tree_pages = len(start.hit.page_ids)
        seq.num_computed_tokens = start.num_tokens
        seq.num_unsettled_tokens = seq.num_tokens - start.num_tokens
        if num_fetched:
            kv.settle(seq)
        kv.limit_launch(seq)
        self._accounts.enter(seq, kv.now)
        self._running.enter(seq)
        builder.add_row(seq)
        if kv.snapshots is not None:
            kv.snapshots.start(seq, start.hit)
        if start.copy_src >= 0:
            kv.copies.on_device(start.copy_src, seq.page_ids[len(start.page_ids)])
        num_cached = start.num_tokens
        for entered in self._parts.entered:
            num_cached = entered(seq, num_cached)
        if seq.num_cached_tokens < 0:  # for the first time
            seq.num_cached_tokens = num_cached
            self._totals.num_admitted += 1
            self._totals.num_prompt_tokens += seq.request.num_prompt_tokens
            self._totals.num_cached_tokens += num_cached
        return True
