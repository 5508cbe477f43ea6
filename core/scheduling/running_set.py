"""The running sequences: which have a row, what they compute in a step, and the admission of waiting ones.

Running sequences are served first, and may preempt others for the pages that they need. Then admission decides which
waiting sequences enter a row in this step; it never preempts.
"""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from math import inf

from penstock.core.kv.kv_pages import KVPages, Start, find_start, is_sibling_ready
from penstock.core.policies.hooks import Hooks
from penstock.core.policies.policy import Policy
from penstock.core.scheduling.accounts import Accounts
from penstock.core.scheduling.batches import Batches
from penstock.core.scheduling.decode_parts import DecodeParts
from penstock.core.scheduling.part import Parts
from penstock.core.scheduling.stats import Totals
from penstock.core.scheduling.step_record import Admission, Blocked
from penstock.core.scheduling.suspects import Suspects
from penstock.core.sequences.intake import WorkerLimits
from penstock.core.sequences.sequence import Request, Sequence
from penstock.core.sequences.waiting_queue import WaitingQueue
from penstock.core.steps.plan_builder import DecodeBatch, Pages, PlanBuilder
from penstock.core.steps.prefill_pace import MIN_TOKENS, PromptRoom
from penstock.core.steps.whole_images import whole_end


class RunningSet:
    """Rows 0 .. max_num_seqs-1 and the sequences in them.

    A sequence enters as a prefill, is a decode from its first launched sample on, and drains once
    its last sample is launched. (Dicts serve as ordered sets: batch order is the order of entry.)
    """

    __slots__ = (
        "_batch", "_free_rows", "_most_background", "_parts", "background", "decodes", "draining", "freed_rows",
        "num_entered", "num_left", "prefills", "rows_of",
    )  # fmt: skip

    def __init__(self, max_num_seqs: int, num_parts: int = 1) -> None:
        """Each plan takes the decodes of one of `num_parts` parts."""
        self._free_rows = list(range(max_num_seqs))
        heapify(self._free_rows)
        self.prefills: dict[Sequence, None] = {}
        self.decodes: dict[Sequence, None] = {}
        self.draining: dict[Sequence, None] = {}
        self.background: dict[Sequence, None] = {}  # the running ones that no client waits for
        self._most_background = inf  # how many of them may decode in a step
        self.freed_rows: list[int] = []  # since the last plan
        self.num_entered = 0  # ever
        self.num_left = 0  # ever
        self.rows_of: dict[str, dict[str, int]] = {}  # by tenant and group
        self._batch: DecodeBatch | None = None  # of all decodes
        self._parts = DecodeParts(num_parts) if num_parts > 1 else None

    def __len__(self) -> int:
        return len(self.prefills) + len(self.decodes) + len(self.draining)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.decodes
        yield from self.prefills
        yield from self.draining

    @property
    def has_others(self) -> bool:
        """Whether a client waits for some running sequence."""
        return len(self) > len(self.background)

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
        if seq.request.is_background:
            self.background[seq] = None
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
        self.background.pop(seq, None)
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
        if self._parts is not None:
            self._parts.join(seq)

    def to_draining(self, seq: Sequence) -> None:
        """The sequence's last sample is launched; only results are missing."""
        self._decodes_no_more(seq)
        self.draining[seq] = None

    def decode_batch(self) -> DecodeBatch:
        """Return the decodes for the next plan; the same object until a sequence joins or leaves."""
        if self._parts is not None:
            return self._parts.next_batch()
        if self._batch is None:
            seqs = list(self.decodes)
            if self._most_background < inf:
                held = dict.fromkeys(list(self.background)[int(self._most_background) :])
                seqs = [seq for seq in seqs if seq not in held]
            self._batch = DecodeBatch(seqs)
        return self._batch

    def allow_background(self, num_rows: float) -> None:
        """Let this many background rows decode in the next steps (with pipeline stages, all of them do)."""
        if num_rows != self._most_background:
            self._most_background = num_rows
            self._batch = None

    def victim(self, policy: Policy) -> Sequence:
        """Return the sequence that loses its row first, a background one if possible. At least one must be running."""
        return policy.victim(self.background or self)

    def _decodes_no_more(self, seq: Sequence) -> None:
        del self.decodes[seq]
        self._batch = None
        if self._parts is not None:
            self._parts.leave(seq)


def _is_background(seq: Sequence) -> bool:
    return seq.request.is_background


class Launches:
    """What sequences in rows compute in a step: a token of each decode, and chunks of prefills."""

    __slots__ = (
        "_has_drafts", "_images_are_whole", "_kv", "_last", "_num_parts", "_policy", "_preempt", "_running", "_totals",
        "_unsent", "is_stalled", "num_context", "takes_all",
    )  # fmt: skip

    def __init__(
        self,
        running: RunningSet,
        kv: KVPages,
        policy: Policy,
        preempt: Callable[[Sequence, str], None],
        totals: Totals,
        num_parts: int,
        *,
        has_drafts: bool,
        images_are_whole: bool = False,
    ) -> None:
        """`preempt(sequence, reason)` takes the sequence's row and pages."""
        self._running = running
        self._kv = kv
        self._policy = policy
        self._preempt = preempt
        self._totals = totals
        self._num_parts = num_parts
        self._last: DecodeBatch | None = None
        self._has_drafts = has_drafts
        self._images_are_whole = images_are_whole
        # Pages, too few for a whole image, of a sequence in an epoch: they are sent with its next chunk.
        self._unsent: list[tuple[Sequence, int, Pages]] = []
        self.num_context = 0  # sum of the positions of the decodes that were launched last
        self.takes_all = num_parts == 1  # whether each step takes all decodes
        self.is_stalled = False  # whether, in this step, a sequence waits for pages of others that are about to end

    def decodes(self, builder: PlanBuilder) -> tuple[DecodeBatch, list[int]]:
        """Begin a step: launch one token of each decode. Returns these decodes and their positions."""
        self.is_stalled = False
        decodes, starts = self._decodes_of_part(builder)
        if not starts and self._num_parts > 1:  # if one part has nothing to compute, another one may
            others = (self._decodes_of_part(builder) for _ in range(1, self._num_parts))
            decodes, starts = next((each for each in others if each[1]), (DecodeBatch([]), []))
        if decodes is self._last and self.takes_all and not self._has_drafts:  # each has advanced by one token
            self.num_context += len(starts)
        else:
            self._last, self.num_context = decodes, sum(starts)
        return decodes, starts

    def _decodes_of_part(self, builder: PlanBuilder) -> tuple[DecodeBatch, list[int]]:
        batch = self._running.decode_batch()
        seqs = batch.seqs
        # No budget check is needed: admissions use only what the running rows leave over, so there are never more
        # running rows than tokens in a step.
        num_preemptions = self._totals.num_preemptions
        starts: list[int] = []
        append_start = starts.append
        unplaced: list[Sequence] = []
        for seq in seqs:
            start = seq.num_computed_tokens
            if start >= seq.launch_limit and not self._extend(seq, builder):
                unplaced.append(seq)
                continue
            seq.num_computed_tokens = start + 1
            append_start(start)
        if unplaced or num_preemptions != self._totals.num_preemptions:
            not_placed = dict.fromkeys(unplaced)
            placed = [seq for seq in seqs if seq.row >= 0 and seq not in not_placed]
            return DecodeBatch(placed), [seq.num_computed_tokens - 1 for seq in placed]
        return batch, starts

    def _extend(self, seq: Sequence, builder: PlanBuilder) -> bool:
        """Give a decode the pages for its next position; False if it computes nothing in this step."""
        running, kv = self._running, self._kv
        if seq.row < 0:
            return False  # preempted a moment ago
        if seq.num_computed_tokens >= seq.max_computed_tokens:
            running.to_draining(seq)
            return False
        while not kv.reserve_next(seq):
            if running.draining or (kv.windows and seq.num_inflight_tokens):
                # Pages of draining rows, or its own behind a window, come back with results: cheaper than preempting.
                self.is_stalled = True
                return False
            victim = running.victim(self._policy)
            if victim.num_computed_tokens >= victim.max_computed_tokens:
                self.is_stalled = True  # the victim is about to end
                return False
            self._preempt(victim, f"{seq.request_id}/{seq.sequence_idx} needed a page")
            if victim is seq:
                return False
        if kv.windows:
            builder.add_pages(seq, *kv.grow(seq, seq.launch_limit + 1))
        else:
            builder.append_page(seq, kv.append_page(seq))
        if kv.snapshots is not None:
            kv.snapshots.decodes_on(seq, seq.num_computed_tokens)
        return True

    def prefills(self, builder: PlanBuilder, room: PromptRoom, *, is_alone: bool) -> None:
        """Launch the next chunks of prefills; `is_alone`: nothing else is in this step or in flight."""
        seqs = list(self._running.prefills)
        if room.background is not None:
            seqs.sort(key=_is_background)
        for seq in seqs:
            if seq.row < 0:
                continue
            start = seq.num_computed_tokens
            num_tokens = room.tokens_for(seq, start)
            if num_tokens <= 0:
                if room.is_limited(seq) or builder.chunks or room.num_tokens <= 0:
                    break
                num_tokens = min(MIN_TOKENS, room.num_tokens)  # expensive far into a prompt, but it must go on
            end = min(start + num_tokens, seq.num_tokens)
            if self._images_are_whole and seq.request.images:
                end = whole_end(seq, start, end, start + room.num_tokens)
                if end == start:
                    continue  # wait for a step with room for the whole image
            self._send_pages(seq, builder)
            if end > seq.launch_limit:  # only with window groups: they get pages chunk by chunk
                end = self._end_with_pages(seq, end, builder, is_alone and not builder.chunks)
                if seq.row < 0:
                    continue
                if end <= start:
                    self.is_stalled = True
                    break
            num_tokens = end - start
            if self._kv.snapshots is not None:
                num_tokens = self._kv.snapshots.chunk(seq, start, num_tokens)
            room.use(seq, start, builder.add_next_chunk(seq, num_tokens))

    def _end_with_pages(self, seq: Sequence, end: int, builder: PlanBuilder, can_preempt: bool) -> int:
        """Give a prefill pages for a chunk that ends at `end` or, if there are too few, before; return where.

        The sequence itself may be preempted (`can_preempt`).
        """
        start = seq.num_computed_tokens
        is_whole = self._images_are_whole and seq.request.images
        least = whole_end(seq, start, start + 1, end) if is_whole else start + 1
        end = min(end, self._grow(seq, end, least, builder, can_preempt))
        if not is_whole:
            return end
        if seq.row < 0:
            builder.take_pages(seq)
            return start
        end = whole_end(seq, start, end, end)
        if end <= start:
            self._unsent.append((seq, seq.epoch, builder.take_pages(seq)))
        return end

    def _send_pages(self, seq: Sequence, builder: PlanBuilder) -> None:
        if self._unsent:
            for its, epoch, pages in self._unsent:
                if its is seq and epoch == seq.epoch:
                    builder.add_pages(seq, *pages)
            self._unsent = [each for each in self._unsent if each[0] is not seq and each[0].row >= 0]

    def _grow(self, seq: Sequence, end: int, least: int, builder: PlanBuilder, can_preempt: bool) -> int:
        """Give a prefill pages for positions before `end`, or as many as there are; return how many positions.

        With less than `least` it could compute nothing.

        Sequences in this step or in flight are not preempted for this: their pages come back anyway, or they continue.
        """
        pages = self._kv.grow(seq, end)
        while can_preempt and seq.launch_limit < least:
            victim = self._running.victim(self._policy)
            self._preempt(victim, f"{seq.request_id}/{seq.sequence_idx} needed a page")
            if victim is seq:
                return 0
            pages = self._kv.grow(seq, end)
        builder.add_pages(seq, *pages)
        return seq.launch_limit


class Admissions:
    """Moves sequences from waiting to running, in policy order, while budget, rows and pages last."""

    __slots__ = (
        "_accounts", "_batches", "_blocked", "_favoured", "_hooks", "_images_are_whole", "_is_held", "_kv", "_parts",
        "_running", "_suspects", "_totals", "_waiting",
    )  # fmt: skip

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningSet,
        kv: KVPages,
        totals: Totals,
        suspects: Suspects,
        accounts: Accounts,
        batches: Batches | None,
        parts: Parts,
        hooks: Hooks,
        limits: WorkerLimits,
    ) -> None:
        """`hooks`: of the policy."""
        self._images_are_whole = limits.images_are_whole
        self._accounts = accounts
        self._waiting = waiting
        self._running = running
        self._kv = kv
        self._totals = totals
        self._suspects = suspects
        self._batches = batches
        self._parts = parts
        self._hooks = hooks
        self._is_held = False
        self._favoured: Sequence | None = None  # others were preempted for it: it need not wait until one leaves
        self._blocked: tuple[Sequence, int] | None = None  # the head that lacked pages, and how many it needs

    def hold(self) -> None:
        """Admit nothing until a sequence has left: otherwise sequences that do not fit together take turns forever."""
        self._is_held = True

    @property
    def is_held(self) -> bool:
        """Whether nothing is admitted until a sequence has left."""
        return self._is_held

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
        """A sequence has ended: there may be room now, and another head."""
        self._is_held = False
        self._blocked = None

    def admit(self, builder: PlanBuilder, room: PromptRoom, admitted: list[Admission], *, is_stalled: bool) -> str:
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
            if self._images_are_whole and seq.request.images and not self._first_image_fits(seq, start, room):
                return Blocked.BUDGET
            if not self._enter(seq, start, builder):
                return Blocked.NO_PAGES
            what = seq.num_tokens, start.num_tokens, start.is_fork, len(start.hit.host_page_ids)
            admitted.append(Admission(seq.request_id, seq.sequence_idx, seq.row, *what))
            self._launch_first_chunk(seq, builder, room)
        return ""

    def _why_not(self, seq: Sequence, room: PromptRoom, is_stalled: bool) -> str:
        """Why the head of the queue, and with it all others, cannot enter in this step; "": it may."""
        request = seq.request
        if self._batches is not None and (why := self._batches.why_not(request)):
            return why
        if room.all.tokens_from(0) <= 0:
            return Blocked.BUDGET
        if request.is_background and (
            room.tokens_for(seq, 0) <= 0 if room.background is not None else self._running.has_others
        ):
            return Blocked.OTHERS
        if not self._running.num_free_rows:
            return Blocked.NO_ROW
        if is_stalled or self._lacks_pages_still(seq):
            return Blocked.NO_PAGES
        if self._hooks.may_join is not None and not self._hooks.may_join(request):
            return Blocked.TARGETS
        if self._is_held and len(self._running) and seq is not self._favoured:
            return Blocked.NO_PAGES_SINCE
        return ""

    def _launch_first_chunk(self, seq: Sequence, builder: PlanBuilder, room: PromptRoom) -> None:
        """Launch the first chunk of a sequence that has just entered a row."""
        start = seq.num_computed_tokens
        is_whole = self._images_are_whole and seq.request.images
        end = min(start + max(1, room.tokens_for(seq, start)), seq.num_tokens)
        if is_whole:
            end = whole_end(seq, start, end, start + room.num_tokens)
        builder.add_pages(seq, *self._kv.grow(seq, end))
        end = min(end, seq.launch_limit)
        if is_whole:
            end = whole_end(seq, start, end, end)
        num_tokens = end - start
        if self._kv.snapshots is not None:
            num_tokens = self._kv.snapshots.chunk(seq, start, num_tokens)
        room.use(seq, start, builder.add_next_chunk(seq, num_tokens))

    def has_all_made(self, seq: Sequence) -> bool:
        """Whether the worker has what the head of the queue needs of it; otherwise the head is held, and asked for."""
        asked = self._parts.asked_early
        start = find_start(seq, self._kv) if asked else None
        return start is None or all(admits(seq, start) for admits in asked)

    def _first_image_fits(self, seq: Sequence, start: Start, room: PromptRoom) -> bool:
        """Whether the step has room for the shortest first chunk: it ends behind an image, or before one."""
        first = start.num_tokens
        return whole_end(seq, first, first + 1, first + room.num_tokens) > first

    def _num_new_pages(self, seq: Sequence, start: Start) -> int:
        """Pages of the first group for all known tokens, and one per window group, which gets more with its chunks."""
        num_fetched = sum(ref < 0 for refs in start.hit.window_page_ids for ref in refs)
        if self._images_are_whole and seq.request.images:
            first = start.num_tokens
            num_first = whole_end(seq, first, first + 1, seq.num_tokens) - first
            num_fetched += sum(-(-num_first // group.page_size) for group in self._kv.windows)
        return self._kv.pages_for(seq.num_tokens) - len(start.page_ids) + len(self._kv.windows) + num_fetched

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
            self._is_held = False
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
        is_first = seq.num_cached_tokens < 0
        if self._hooks.on_admitted is not None:
            self._hooks.on_admitted(seq.request, seq.num_tokens - start.num_tokens if is_first else 0)
        if is_first:
            seq.num_cached_tokens = num_cached
            self._totals.num_admitted += 1
            self._totals.num_prompt_tokens += seq.request.num_prompt_tokens
            self._totals.num_cached_tokens += num_cached
        return True
