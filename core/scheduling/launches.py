"""What running sequences compute in a step. They are served before waiting ones enter, and may preempt others for the
pages that they need.
"""

from collections.abc import Callable

from penstock.core.kv.kv_pages import KVPages
from penstock.core.scheduling.part import Parts
from penstock.core.scheduling.running_set import RunningSet
from penstock.core.scheduling.stats import Totals
from penstock.core.sequences.sequence import Sequence
from penstock.core.steps.plan_builder import DecodeBatch, Pages, PlanBuilder
from penstock.core.steps.prefill_pace import MIN_TOKENS, Room


class Launches:
    """What sequences in rows compute in a step: a token of each decode, and chunks of prefills."""

    __slots__ = (
        "_chunk_end", "_has_drafts", "_kv", "_last", "_policy", "_preempt", "_running", "_totals", "_unsent",
        "is_stalled", "num_context", "takes_all",
    )  # fmt: skip

    def __init__(
        self,
        running: RunningSet,
        kv: KVPages,
        parts: Parts,
        preempt: Callable[[Sequence, str], None],
        totals: Totals,
    ) -> None:
        """`preempt(sequence, reason)` takes the sequence's row and pages."""
        self._running = running
        self._kv = kv
        self._policy = parts.policy
        self._chunk_end = parts.chunk_end
        self._preempt = preempt
        self._totals = totals
        self._last: DecodeBatch | None = None
        self._has_drafts = parts.has_drafts
        # Pages, too few for a chunk, of a sequence in an epoch: they are sent with its next chunk.
        self._unsent: list[tuple[Sequence, int, Pages]] = []
        self.num_context = 0  # sum of the positions of the decodes that were launched last
        self.takes_all = running.num_parts == 1  # whether each step takes all decodes
        self.is_stalled = False  # whether, in this step, a sequence waits for pages of others that are about to end

    def decodes(self, builder: PlanBuilder) -> tuple[DecodeBatch, list[int]]:
        """Begin a step: launch one token of each decode. Returns these decodes and their positions."""
        self.is_stalled = False
        decodes, starts = self._decodes_of_part(builder)
        if not starts and not self.takes_all:  # if one part has nothing to compute, another one may
            others = (self._decodes_of_part(builder) for _ in range(1, self._running.num_parts))
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

    def prefills(self, builder: PlanBuilder, room: Room, *, is_alone: bool) -> None:
        """Launch the next chunks of prefills; `is_alone`: nothing else is in this step or in flight."""
        seqs = list(self._running.prefills)
        if room.has_limits:
            seqs.sort(key=lambda seq: room.is_limited(seq.request))
        for seq in seqs:
            if seq.row < 0:
                continue
            start = seq.num_computed_tokens
            num_tokens = room.tokens_for(seq.request, start)
            if num_tokens <= 0:
                if room.is_limited(seq.request) or builder.chunks or room.num_tokens <= 0:
                    break
                num_tokens = min(MIN_TOKENS, room.num_tokens)  # expensive far into a prompt, but it must go on
            end = self._chunk_end(seq, start, min(start + num_tokens, seq.num_tokens), start + room.num_tokens)
            if end == start:
                continue  # wait for a step with more room
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
            room.use(seq.request, start, builder.add_next_chunk(seq, num_tokens))

    def _end_with_pages(self, seq: Sequence, end: int, builder: PlanBuilder, can_preempt: bool) -> int:
        """Give a prefill pages for a chunk that ends at `end` or, if there are too few, before; return where.

        The sequence itself may be preempted (`can_preempt`).
        """
        start = seq.num_computed_tokens
        least = self._chunk_end(seq, start, start + 1, end)
        end = min(end, self._grow(seq, end, least, builder, can_preempt))
        if seq.row < 0:
            builder.take_pages(seq)
            return start
        end = self._chunk_end(seq, start, end, end)
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
