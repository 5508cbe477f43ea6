"""Results of steps: each is checked against its step, then applied, and each owner is told.

A result is applied as a whole or not at all. The usual result costs next to nothing for each sequence: its tokens are
appended, and only sequences for which more may happen are examined (`SettleCalendar`).
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import accumulate

from penstock.core.kv.kv_pages import KVPages
from penstock.core.scheduling.accounts import Accounts
from penstock.core.scheduling.running_set import RunningSet
from penstock.core.scheduling.stats import Totals
from penstock.core.sequences.sequence import Owner, Sequence
from penstock.core.steps.drafts import DraftOutcome
from penstock.core.steps.logprob_columns import attach_logprobs, check_logprobs
from penstock.core.steps.plan_builder import InFlightStep
from penstock.core.steps.pooled_columns import attach_pooled, check_pooled
from penstock.core.steps.sampler_states import attach_sampler_states, check_sampler_states, keeps_state
from penstock.ipc.codec import unpack_int32, unpack_tokens
from penstock.ipc.messages import FinishReason, RowError, SequenceBill, SequenceDelta, StepResult, TokenBatch

Deltas = dict[Owner, list[SequenceDelta]]
"""The deltas to send, by the owner that each request was added with."""

MAX_STEPS_AHEAD = 64


class UnexpectedResultError(ValueError):
    """A result that is not for the oldest step in flight, or has the wrong size. Nothing was changed."""


def checked_tokens(in_flight: deque[InFlightStep], result: StepResult, vocab_size: int) -> tuple[list[int], list[int]]:
    """Return a result's tokens, in the order of the sampling rows of the oldest step in flight, and how many each has.

    The second list is empty if each has one.

    Raises:
        UnexpectedResultError: it is not that step's result.
    """
    if len(result.token_ids) % 4:
        raise UnexpectedResultError(f"the tokens are not an int32 buffer: {len(result.token_ids)} bytes")
    tokens = unpack_tokens(result.token_ids)  # one comparison is enough for all of them
    if not in_flight or in_flight[0].step_id != result.step_id:
        raise UnexpectedResultError(f"result of step {result.step_id}, which is not the oldest in flight")
    step = in_flight[0]
    counts = _checked_counts(step, result) if result.num_tokens or result.num_drafted or result.num_forced else []
    num_due = sum(counts) if counts else step.num_samples
    if len(tokens) != num_due:
        raise UnexpectedResultError(f"step {result.step_id} should return {num_due} tokens, got {len(tokens)}")
    if tokens and max(tokens) >= vocab_size:
        raise UnexpectedResultError(
            f"step {result.step_id} returned a token outside the vocabulary of {vocab_size} tokens"
        )
    if step.has_logprobs and (error := check_logprobs(step, result, counts)):
        raise UnexpectedResultError(error)
    if step.num_pooled and (error := check_pooled(step, result)):
        raise UnexpectedResultError(error)
    if result.sampler_states and (error := check_sampler_states(step, result)):
        raise UnexpectedResultError(error)
    for row_error in result.row_errors:
        if not 0 <= row_error.sample_idx < step.num_samples:
            raise UnexpectedResultError(
                f"step {result.step_id} samples {step.num_samples} rows, got an error of row {row_error.sample_idx}"
            )
    return tokens, counts


def _checked_counts(step: InFlightStep, result: StepResult) -> list[int]:
    """How many tokens each row returns: one, or as many as its drafts allow."""
    num_rows, columns = step.num_samples, (result.num_tokens, result.num_drafted, result.num_forced)
    for column in columns:
        if column and len(column) != 4 * num_rows:
            raise UnexpectedResultError(
                f"step {step.step_id} samples {num_rows} rows, got {len(column)} bytes of counts"
            )
    counts = unpack_int32(result.num_tokens).tolist()
    guessed = unpack_int32(result.num_drafted) if result.num_drafted else (0,) * num_rows
    sizes = step.decode_sizes
    allowed = [*sizes, *[1] * (num_rows - len(sizes))] if len(sizes) < num_rows else sizes
    for num_guessed, size in zip(guessed, allowed, strict=True):
        if not 0 <= num_guessed < size:
            raise UnexpectedResultError(f"step {step.step_id} guessed more tokens than were allowed")
    for count, num_guessed, size in zip(counts, guessed, allowed, strict=False):
        if count != 1 and not (size > 1 and 0 <= count <= 1 + num_guessed):
            raise UnexpectedResultError(f"step {step.step_id} returned more or fewer tokens than its drafts allow")
    return counts


def draft_outcome(step: InFlightStep, result: StepResult, counts: list[int]) -> DraftOutcome:
    """What came of a step's drafts; `counts` are those of `checked_tokens`."""
    num = len(step.decodes.seqs)
    guessed = unpack_int32(result.num_drafted).tolist()[:num] if result.num_drafted else [0] * num
    returned = counts[:num] if counts else [1] * num
    return DraftOutcome(
        step.decodes.seqs, step.num_drafts, guessed, returned, step.num_context, bool(step.chunks), time_of(result),
        result.num_draft_us,
    )  # fmt: skip


def time_of(result: StepResult) -> int:
    """The microseconds of a step and of the device's wait for it, which counts up to the step's own time."""
    return result.num_forward_us + min(result.num_idle_us, result.num_forward_us)


class SettleCalendar:
    """Step id -> sequences for which its result may mean more than a token: a page to cache, the full length.

    A sequence settles one token per step, so it cannot reach its `settle_event` before the step it is entered for.
    If a step left it out, it reaches the event later, and is entered again. After a step with drafts each row is
    checked: a sequence that settled more tokens is entered again, for an earlier step.
    """

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: dict[int, list[tuple[Sequence, int]]] = {}

    def enter(self, seq: Sequence, step_id: int) -> None:
        """Check the sequence again when it can reach its settle_event, counted from the result of `step_id`.

        If that is far off, check earlier: entries of sequences that end in the meantime should not stay for long.
        """
        # `num_settled_tokens` and `min` are inlined: the calls cost 4 % of a step of 256 rows with `KVPages`.
        num_steps = seq.settle_event - (len(seq.token_ids) - seq.num_unsettled_tokens)
        if num_steps > MAX_STEPS_AHEAD:
            num_steps = MAX_STEPS_AHEAD
        seq.due_step = due_step = step_id + num_steps
        entries = self._due.get(due_step)
        if entries is None:
            self._due[due_step] = [(seq, seq.epoch)]
        else:
            entries.append((seq, seq.epoch))

    def take(self, step_id: int) -> Collection[Sequence]:
        """Return the sequences to check after this step's result, each once; drop outdated entries."""
        entries = self._due.pop(step_id, None)
        if entries is None:
            return ()
        return {seq: None for seq, epoch in entries if seq.running_epoch == epoch and seq.due_step == step_id}

    def has(self, seq: Sequence) -> bool:
        """Whether the sequence will be checked again; for checks."""
        return (seq, seq.epoch) in self._due.get(seq.due_step, ())


class Settling:
    """Applies results to the sequences of one worker."""

    __slots__ = ("_accounts", "_kv", "_remove", "_running", "_totals", "calendar")

    def __init__(
        self, kv: KVPages, running: RunningSet, totals: Totals, accounts: Accounts, remove: Callable[[Sequence], None]
    ) -> None:
        """`remove` takes a sequence that ends out of its row."""
        self._kv = kv
        self._accounts = accounts
        self._running = running
        self._totals = totals
        self._remove = remove
        self.calendar = SettleCalendar()

    def apply(
        self, step: InFlightStep, result: StepResult, tokens: list[int], counts: list[int]
    ) -> dict[Owner, TokenBatch]:
        """Apply a step's result, whose tokens `checked_tokens` returned; return what to tell each owner."""
        failed = _failed_sequences(step, result) if result.row_errors else []
        step_id = step.step_id
        due = self.calendar.take(step_id)
        output: Deltas = {}
        num_dropped = 0
        in_columns = not (failed or step.has_logprobs)
        has_states = bool(result.sampler_states)
        has_left = step.num_left != self._running.num_left
        is_special = step.num_drafts or has_states or not in_columns
        if has_left or is_special or not step.decodes.stop_token_ids.isdisjoint(tokens):
            by_row = _tokens_by_row(tokens, counts)
            apart, num_dropped = self._settle_decodes(
                step, by_row, output, in_columns=in_columns, has_states=has_states
            )
        else:
            apart = self._settle_all_decodes(step, tokens, due, output)
        columns = step.decodes.audience.columns(result.token_ids, apart, counts) if in_columns else {}
        if step.chunks:
            num_dropped += self._settle_chunks(step, tokens, output)
        if step.has_logprobs:
            attach_logprobs(step, result, counts, output)
        if has_states:
            attach_sampler_states(step, result, output)
        if step.num_pooled:
            self._totals.num_output_tokens -= attach_pooled(step, result, output)
        if failed:
            self._end_failed(failed, output)
        for seq in due:
            if seq.row >= 0 and seq.due_step == step_id:  # this step left it out
                self.calendar.enter(seq, step_id)
        self._totals.num_output_tokens += len(tokens) - num_dropped
        self._totals.num_dropped_tokens += num_dropped
        if not output:
            return {owner: TokenBatch(step_id, (), told) for owner, told in columns.items()}
        owners = dict.fromkeys([*columns, *output])
        return {owner: TokenBatch(step_id, tuple(output.get(owner, ())), columns.get(owner)) for owner in owners}

    def _settle_chunks(self, step: InFlightStep, tokens: list[int], output: Deltas) -> int:
        """Settle a step's chunks, whose tokens come last in `tokens`; return how many tokens were dropped."""
        num_dropped = 0
        position = len(tokens) - sum(chunk.samples for chunk in step.chunks)
        for seq, epoch, _, num_new, samples, _ in step.chunks:
            if seq.running_epoch != epoch:
                num_dropped += samples
            elif samples:
                seq.append_token(tokens[position])
                seq.num_unsettled_tokens += 1 - num_new
                delta = self._settle_sample(seq, (tokens[position],), step.step_id)
                output.setdefault(seq.owner, []).append(delta)
            else:
                seq.num_unsettled_tokens -= num_new
                self._kv.settle(seq)
            position += samples
        return num_dropped

    def _settle_all_decodes(
        self, step: InFlightStep, tokens: list[int], due: Collection[Sequence], output: Deltas
    ) -> set[int]:
        """Settle all decodes in the usual case: none has left its row, no token stops one, and each has one token.

        Returns the positions of sequences that end here by length; only they are in `output`.
        """
        batch = step.decodes
        ended: set[int] = set()
        for append_token, token in zip(batch.token_appenders, tokens, strict=False):  # the tokens of the chunks follow
            append_token(token)
        for seq in due:
            position = batch.positions.get(seq)
            num_tokens = len(seq.token_ids)  # properties inlined: this runs many times per step
            if position is None or num_tokens - seq.num_unsettled_tokens < seq.settle_event:
                continue
            if num_tokens >= seq.max_len:
                ended.add(position)
                output.setdefault(seq.owner, []).append(self._settle_sample(seq, (tokens[position],), step.step_id))
            else:
                self._settle_pages(seq, step.step_id)
        return ended

    def _settle_decodes(
        self,
        step: InFlightStep,
        drawn: Iterable[tuple[int, ...]],
        output: Deltas,
        *,
        in_columns: bool,
        has_states: bool,
    ) -> tuple[set[int], int]:
        """Settle decodes in the general case; return the positions not sent as columns, and how many tokens dropped."""
        apart: set[int] = set()
        num_dropped = 0
        batch, step_id, num_drafts = step.decodes, step.step_id, step.num_drafts
        for i, (seq, epoch, new) in enumerate(zip(batch.seqs, batch.epochs, drawn, strict=False)):
            if seq.running_epoch != epoch:
                num_dropped += len(new)
                apart.add(i)
                continue
            if num_drafts and num_drafts[i]:
                self._correct(seq, 1 + num_drafts[i], len(new))
            seq.token_ids.extend(new)
            if seq.num_settled_tokens >= seq.settle_event or not seq.stop_token_ids.isdisjoint(new):
                delta = self._settle_sample(seq, new, step_id)
                num_dropped += len(new) - len(delta.token_ids)
            else:
                if len(new) > 1:
                    self.calendar.enter(seq, step_id)  # its event is nearer than expected
                if in_columns and new and not (has_states and keeps_state(seq)):
                    continue
                delta = SequenceDelta(seq.request_id, seq.sequence_idx, new)
            apart.add(i)
            if delta.token_ids:
                output.setdefault(seq.owner, []).append(delta)
        return apart, num_dropped

    def _correct(self, seq: Sequence, num_launched: int, num_tokens: int) -> None:
        """A step with drafts has returned: positions whose drafts were rejected do not count as computed."""
        seq.num_unsure_tokens -= num_launched
        seq.num_computed_tokens -= num_launched - num_tokens
        if seq in self._running.draining and seq.num_computed_tokens < seq.max_computed_tokens:
            self._running.to_decode(seq)

    def _settle_sample(self, seq: Sequence, new: tuple[int, ...], step_id: int) -> SequenceDelta:
        """Settle appended tokens that may contain a first or last one; drop those after a stop."""
        finish_reason: FinishReason | None = None
        stop_token_id: int | None = None
        if num_kept := _up_to_stop(seq, new):
            finish_reason, stop_token_id = "stop", new[num_kept - 1]
            del seq.token_ids[len(seq.token_ids) - len(new) + num_kept :]
            new = new[:num_kept]
        elif seq.num_tokens >= seq.max_len:
            finish_reason = "length"
        num_cached, queued_us, late = 0, 0, ""
        if seq.num_outputs == len(new):
            num_cached, queued_us, late = seq.num_cached_tokens, seq.queued_us, seq.request.late
        bill: SequenceBill | None = None
        if finish_reason is None:
            self._settle_pages(seq, step_id)
        else:
            self._totals.num_completed += 1
            self._kv.settle(seq)
            self._remove(seq)
            bill = self._accounts.bill(seq, self._kv.now)
        name = seq.request_id, seq.sequence_idx
        return SequenceDelta(
            *name, new, finish_reason, stop_token_id, num_cached, queued_us=queued_us, bill=bill, late=late
        )

    def _settle_pages(self, seq: Sequence, step_id: int) -> None:
        """Cache the pages that are now full and settled, and enter the sequence for its next event."""
        self._kv.settle(seq)
        seq.settle_event = self._kv.next_settle_event(seq)
        self.calendar.enter(seq, step_id)

    def _end_failed(self, failed: list[tuple[Sequence, RowError]], output: Deltas) -> None:
        """End failed sequences; their last deltas replace those with the meaningless tokens."""
        for seq, error in failed:
            if error.code == "invalid_logits":
                self._totals.num_invalid_logits += 1
            if seq.row >= 0:  # otherwise that token was its last one
                self._remove(seq)
            deltas = output.setdefault(seq.owner, [])
            name = seq.request_id, seq.sequence_idx
            deltas[:] = [delta for delta in deltas if (delta.request_id, delta.sequence_idx) != name]
            deltas.append(seq.error_delta(error.reason, error.code, self._accounts.bill(seq, self._kv.now)))


def _tokens_by_row(tokens: list[int], counts: list[int]) -> Iterable[tuple[int, ...]]:
    """Split the tokens of `checked_tokens` by row."""
    if not counts:
        return zip(tokens, strict=True)
    return (tuple(tokens[end - count : end]) for end, count in zip(accumulate(counts), counts, strict=True))


def _up_to_stop(seq: Sequence, new: tuple[int, ...]) -> int:
    """How many of the tokens appended last count: up to and with the one that stops the sequence; 0 if none does."""
    stop_token_ids = seq.stop_token_ids
    if stop_token_ids.isdisjoint(new):
        return 0
    # Up to min_tokens the worker's sampler masks stop tokens; one that comes anyway does not stop the sequence.
    first = max(0, seq.request.sampling.min_tokens - 1 - (seq.num_outputs - len(new)))
    return next((i + 1 for i in range(first, len(new)) if new[i] in stop_token_ids), 0)


def sampling_rows(step: InFlightStep) -> list[tuple[Sequence, int]]:
    """The sequences for which a step samples, each with its epoch at that time."""
    return [
        *zip(step.decodes.seqs, step.decodes.epochs, strict=True),
        *((chunk.seq, chunk.epoch) for chunk in step.chunks if chunk.samples),
    ]


def _failed_sequences(step: InFlightStep, result: StepResult) -> list[tuple[Sequence, RowError]]:
    """Return the failed sequences that are still in the step's epoch, each with its error.

    Call this before the result is applied, and after `checked_tokens`.
    """
    errors = {error.sample_idx: error for error in reversed(result.row_errors)}  # the first error of each row
    rows = enumerate(sampling_rows(step))
    return [(seq, errors[i]) for i, (seq, epoch) in rows if i in errors and seq.running_epoch == epoch]
