"""What each sequence costs: its share of step time, the KV memory it held, and the work that was saved or repeated.

A step takes time D on the worker, from reading the plan to returning tokens. D is split among the step's sequences by
the terms that predict it (`prefill_pace.py`). T is the number of tokens in the step, and w are the learned rates:

    work of a decode    (1 + guesses) w0 / T + w1 + w2 context
    work of a chunk     tokens w0 / T + w3 tokens + w4 (token, context) pairs
    its share           D work / sum of all work

So a step's fixed cost is split by tokens, and a long context pays for its KV reads. Before the rates are known, a step
is split by tokens alone. The shares of a step sum to D.

Nearly every step computes one token for each decode. Such steps need no loop over rows: a share is linear in the
context, and the context grows by one. So three running sums, read when a sequence begins to decode and when it leaves,
give the sum of its shares:

    sum over steps s of (a_s + b_s context_s)  =  A + B (context - t) + C
    A: sum of a_s    B: sum of b_s    C: sum of b_s t_s    t: number of such steps, each from `begin` on

A step that leaves out a decode, has drafts, or has starts that depend on drafts is shared row by row.

A sequence that lost its row still pays for its steps in flight, even if its client has left: its bill is sent when
those steps have returned. Work beyond a stop token, or for a sequence that had failed, is not billed but counted in
`Totals.device_us`. A step that never returned, because its worker died, has no time.
"""

from collections.abc import Sequence as ListOf

from penstock.core.scheduling.stats import Totals
from penstock.core.sequences.sequence import Account, Owner, Sequence
from penstock.core.steps.drafts import DraftOutcome
from penstock.core.steps.plan_builder import Chunk, InFlightStep
from penstock.core.steps.prefill_pace import Rates
from penstock.ipc.codec import unpack_int32
from penstock.ipc.messages import SequenceBill, SequenceDelta

_MAX_STEPS = 1 << 20
"""The sums are reset after this many steps: differences of large sums are inexact."""


Bills = dict[Owner, list[SequenceDelta]]


class Accounts:
    """The accounts of all sequences of one scheduler. Times: microseconds for steps, seconds for pages."""

    __slots__ = (
        "_contexts",
        "_decoding",
        "_due",
        "_late",
        "_num_steps",
        "_rates",
        "_rows",
        "_totals",
        "bills",
        "page_bytes",
    )

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self.page_bytes = 0  # of the current worker
        self._decoding: dict[Sequence, None] = {}
        self._rows = 0.0  # A
        self._rates = 0.0  # B
        self._contexts = 0.0  # C
        self._num_steps = 0  # t
        self._late: dict[tuple[Sequence, int], int] = {}  # (sequence, epoch) that left its row -> last step with it
        self._due: dict[Sequence, int] = {}  # aborted -> the step whose return completes its bill
        self.bills: Bills = {}
        """The last deltas of aborted sequences whose bills are complete, until they are taken."""

    # --- a sequence's life ----------------------------------------------------------------------

    def enter(self, seq: Sequence, now: float) -> None:
        """A sequence has got a row, pages, and a start position."""
        if seq.account is None:
            seq.account = Account()
            seq.queued_us = _queued_us(seq, now)
        account = seq.account
        account.num_recomputed_tokens += max(0, account.num_reached - seq.num_computed_tokens)
        seq.page_seconds -= now * _num_pages(seq)

    def leave(self, seq: Sequence, now: float, last_step: int) -> None:
        """A sequence is about to leave its row and still has its pages; `last_step`: its last in flight (-1: none)."""
        account = seq.account
        assert account is not None
        if seq in self._decoding:
            self._collect(account)
            del self._decoding[seq]
        account.num_reached = max(account.num_reached, seq.num_settled_tokens)
        seq.page_seconds += now * _num_pages(seq)
        if last_step >= 0:
            self._late[seq, seq.epoch] = last_step

    def bill(self, seq: Sequence, now: float) -> SequenceBill:
        """Close the account of a sequence that has no row, and return its bill."""
        account = seq.account
        if account is None:  # it never had a row
            return SequenceBill(queued_us=_queued_us(seq, now), waited_for=seq.request.waited_for)
        account.is_closed = True
        self._late.pop((seq, seq.epoch), None)
        return SequenceBill(
            queued_us=seq.queued_us,
            num_steps=account.num_steps,
            device_us=account.num_us,
            kv_byte_seconds=max(0.0, seq.page_seconds) * self.page_bytes,
            num_saved_tokens=max(0, seq.num_cached_tokens),
            num_preemptions=account.num_preemptions,
            num_recomputed_tokens=account.num_recomputed_tokens,
            waited_for=seq.request.waited_for,
            num_guessed_tokens=account.num_guessed,
            num_accepted_tokens=account.num_accepted,
            cache_miss=seq.cache_miss,
        )

    def abort(self, seq: Sequence, now: float) -> None:
        """A sequence has ended because its client has left: its bill is due when it has no steps in flight."""
        last_step = self._late.get((seq, seq.epoch))
        if last_step is None:
            self._send(seq, now)
        else:
            self._due[seq] = last_step

    def _send(self, seq: Sequence, now: float) -> None:
        delta = SequenceDelta(seq.request_id, seq.sequence_idx, (), "abort", bill=self.bill(seq, now))
        self.bills.setdefault(seq.owner, []).append(delta)

    def take_bills(self) -> Bills:
        """Return `bills` and clear it."""
        bills, self.bills = self.bills, {}
        return bills

    def forget_owner(self, owner: Owner) -> None:
        """An owner is gone: drop its bills, complete or due."""
        self.bills.pop(owner, None)
        self._due = {seq: last_step for seq, last_step in self._due.items() if seq.owner != owner}

    def forget_in_flight(self, now: float) -> None:
        """The steps in flight will never return: close the bills that wait for them."""
        self._late.clear()
        due, self._due = self._due, {}
        for seq in due:
            self._send(seq, now)

    def contexts(self) -> dict[Sequence, int]:
        """Return the position at which each decoding sequence is assumed to continue; for checks."""
        return {seq: seq.account.offset + self._num_steps for seq in self._decoding if seq.account is not None}

    # --- a step ---------------------------------------------------------------------------------

    def settle(self, step: InFlightStep, num_us: int, rates: Rates, now: float, outcome: DraftOutcome | None) -> None:
        """Share a step that has returned after `num_us`; call this before any of its result is applied.

        `outcome`: what came of its drafts, if it had any.
        """
        self._totals.device_us += num_us
        decodes, chunks = step.decodes.seqs, step.chunks
        fixed, per_row, per_context_token, per_token, per_pair = rates
        num_tokens, num_context = len(decodes), step.num_context
        starts: list[int] = []
        if not step.is_whole:
            starts = _true_starts(step)
            num_context = sum(starts)
        work = fixed + per_row * num_tokens + per_context_token * num_context
        if chunks or outcome is not None:
            num_tokens += sum(chunk.num_new for chunk in chunks) + (0 if outcome is None else sum(outcome.num_guessed))
            work += sum(per_token * chunk.num_new + per_pair * _pairs(chunk) for chunk in chunks)
        if work <= 0:
            fixed, per_row, per_context_token, per_token, per_pair, work = 1.0, 0.0, 0.0, 0.0, 0.0, 1.0
        scale = num_us / work
        each = scale * fixed / num_tokens
        if decodes:
            row, rate = scale * per_row, scale * per_context_token
            if step.is_whole:
                self._rows += each + row
                self._rates += rate
                self._contexts += rate * self._num_steps
                self._num_steps += 1
                if self._late:
                    self._share_late(step, each + row, rate)
            else:
                self._share_rows(step, starts, outcome, each, row, rate)
        for chunk in chunks:
            share = each * chunk.num_new + scale * (per_token * chunk.num_new + per_pair * _pairs(chunk))
            self._add(chunk.seq, share)
            if chunk.samples and chunk.seq.running_epoch == chunk.epoch:
                self._begin(chunk.seq, chunk.start + chunk.num_new)
        if self._late:
            for seq in [seq for seq, last_step in self._due.items() if last_step <= step.step_id]:
                del self._due[seq]
                self._send(seq, now)
            self._late = {left: last for left, last in self._late.items() if last > step.step_id}
        if self._num_steps >= _MAX_STEPS:
            self._begin_anew()

    def _begin(self, seq: Sequence, context: int) -> None:
        """From the next step on the sequence decodes, beginning at position `context`."""
        assert seq.account is not None
        self._decoding[seq] = None
        self._restart(seq.account, context - self._num_steps)

    def _restart(self, account: Account, offset: int) -> None:
        account.rows, account.rates, account.contexts = self._rows, self._rates, self._contexts
        account.num_steps_before = self._num_steps
        account.offset = offset

    def _collect(self, account: Account) -> None:
        """Add the growth of the sums since `_begin`, or since the last call."""
        shares = self._contexts - account.contexts + (self._rates - account.rates) * account.offset
        account.num_us += self._rows - account.rows + shares
        account.num_steps += self._num_steps - account.num_steps_before
        self._restart(account, account.offset)

    def _share_late(self, step: InFlightStep, row: float, rate: float) -> None:
        """Add the shares of sequences that have left their rows: the sums no longer cover them."""
        batch, starts = step.decodes, unpack_int32(step.starts)
        for seq, epoch in self._late:
            position = batch.positions.get(seq)
            if position is not None and batch.epochs[position] == epoch:
                self._add(seq, row + rate * starts[position])

    def _share_rows(
        self,
        step: InFlightStep,
        starts: ListOf[int],
        outcome: DraftOutcome | None,
        each: float,
        row: float,
        rate: float,
    ) -> None:
        """Share a step row by row; the sums stand still, so the growth of each context is noted in its offset."""
        batch, num_rows = step.decodes, len(step.decodes.seqs)
        guessed, returned = ([0] * num_rows, [1] * num_rows) if outcome is None else outcome[2:4]
        rows = zip(batch.seqs, batch.epochs, starts, guessed, returned, strict=True)
        for seq, epoch, start, num_guessed, num_tokens in rows:
            self._add(seq, each * (1 + num_guessed) + row + rate * start)
            if num_guessed and seq.account is not None:
                seq.account.num_guessed += num_guessed
                seq.account.num_accepted += max(0, num_tokens - 1)
            if seq.running_epoch == epoch and seq.account is not None:
                self._collect(seq.account)
                seq.account.offset = start + num_tokens - self._num_steps

    def _add(self, seq: Sequence, share: float) -> None:
        account = seq.account
        if account is not None and not account.is_closed:
            account.num_us += share
            account.num_steps += 1

    def _begin_anew(self) -> None:
        for seq in self._decoding:
            if seq.account is not None:
                self._collect(seq.account)
                seq.account.offset += self._num_steps
        self._rows = self._rates = self._contexts = 0.0
        self._num_steps = 0
        for seq in self._decoding:
            if seq.account is not None:
                self._restart(seq.account, seq.account.offset)


def _queued_us(seq: Sequence, now: float) -> int:
    """How long a sequence has waited; 0 if it arrived at an earlier scheduler."""
    arrived = seq.request.arrived
    return max(0, int((now - arrived) * 1e6)) if arrived else 0


def _true_starts(step: InFlightStep) -> list[int]:
    """Where the decodes began: now known exactly for those still in their rows, even if the plan had only a bound."""
    batch, planned = step.decodes, unpack_int32(step.starts)
    rows = zip(batch.seqs, batch.epochs, planned, strict=False)
    return [len(seq.token_ids) - 1 if seq.running_epoch == epoch else start for seq, epoch, start in rows]


def _pairs(chunk: Chunk) -> float:
    """(Token, context) pairs of a chunk, counted as in the prediction of a step's time."""
    return chunk.num_new * (chunk.start + chunk.num_new / 2)


def _num_pages(seq: Sequence) -> int:
    return len(seq.page_ids) + (sum(len(table.page_ids) for table in seq.window_tables) if seq.window_tables else 0)
