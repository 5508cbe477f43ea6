"""What a result is held against before it is applied, and what becomes of rows without a token."""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import accumulate

from penstock.core.sequences.sequence import Owner, Sequence
from penstock.core.steps.logprob_columns import check_logprobs
from penstock.core.steps.plan_builder import InFlightStep
from penstock.ipc.codec import unpack_int32
from penstock.ipc.messages import RowError, SequenceDelta, StepResult


class UnexpectedResultError(ValueError):
    """A result that is not for the oldest step in flight, or not of its size. Nothing was changed."""


def checked_tokens(in_flight: deque[InFlightStep], result: StepResult, vocab_size: int) -> tuple[list[int], list[int]]:
    """Return a result's tokens, in the order of the sampling rows of the oldest step in flight, and how many each has.

    The second list is empty if each has one.

    Raises:
        UnexpectedResultError: it is not that step's result.
    """
    if len(result.token_ids) % 4:
        raise UnexpectedResultError(f"the tokens are no int32 buffer: {len(result.token_ids)} bytes")
    # Read as unsigned numbers, a negative one is far too large: one look at all of them is enough.
    tokens: list[int] = memoryview(unpack_int32(result.token_ids)).cast("B").cast("I").tolist()
    if not in_flight or in_flight[0].step_id != result.step_id:
        raise UnexpectedResultError(f"result of step {result.step_id}, which is not the oldest in flight")
    step = in_flight[0]
    counts = _checked_counts(step, result.num_tokens) if result.num_tokens else []
    num_due = sum(counts) if counts else step.num_samples
    if len(tokens) != num_due:
        raise UnexpectedResultError(f"step {result.step_id} brings {num_due} tokens, got {len(tokens)}")
    if tokens and max(tokens) >= vocab_size:
        raise UnexpectedResultError(
            f"step {result.step_id} brings a token outside the vocabulary of {vocab_size} tokens"
        )
    if step.has_logprobs and (error := check_logprobs(step, result, counts)):
        raise UnexpectedResultError(error)
    for row_error in result.row_errors:
        if not 0 <= row_error.sample_idx < step.num_samples:
            raise UnexpectedResultError(
                f"step {result.step_id} samples {step.num_samples} rows, got an error of row {row_error.sample_idx}"
            )
    return tokens, counts


def tokens_by_row(tokens: list[int], counts: list[int]) -> Iterable[tuple[int, ...]]:
    """What `checked_tokens` returned, row by row."""
    if not counts:
        return zip(tokens, strict=True)
    return (tuple(tokens[end - count : end]) for end, count in zip(accumulate(counts), counts, strict=True))


def up_to_stop(seq: Sequence, new: tuple[int, ...]) -> int:
    """How many of these tokens, which were appended last, come up to one that stops the sequence; 0 if none does."""
    stop_token_ids = seq.stop_token_ids
    if stop_token_ids.isdisjoint(new):
        return 0
    # Up to min_tokens the worker's sampler masks stop tokens; one that comes nevertheless does not stop.
    first = max(0, seq.request.sampling.min_tokens - 1 - (seq.num_outputs - len(new)))
    return next((i + 1 for i in range(first, len(new)) if new[i] in stop_token_ids), 0)


def _checked_counts(step: InFlightStep, num_tokens: bytes) -> list[int]:
    """How many tokens each row brings: one, or as many as its drafts allow."""
    if len(num_tokens) != 4 * step.num_samples:
        raise UnexpectedResultError(
            f"step {step.step_id} samples {step.num_samples} rows, got {len(num_tokens)} bytes of counts"
        )
    counts = unpack_int32(num_tokens).tolist()
    most = [*step.decode_sizes, *[1] * (step.num_samples - len(step.decodes.seqs))]
    if not all(count == 1 or 0 <= count <= size > 1 for count, size in zip(counts, most, strict=True)):
        raise UnexpectedResultError(f"step {step.step_id} brings other numbers of tokens than its drafts allow")
    return counts


def failed_sequences(step: InFlightStep, result: StepResult) -> list[tuple[Sequence, RowError]]:
    """Return the failed sequences that live on in the epoch of the step, each with its error.

    To be asked before the result is applied; the result has passed `checked_tokens`.
    """
    sampling = [
        *zip(step.decodes.seqs, step.decodes.epochs, strict=True),
        *((chunk.seq, chunk.epoch) for chunk in step.chunks if chunk.samples),
    ]
    errors = {error.sample_idx: error for error in reversed(result.row_errors)}  # one end for each: the first
    return [(seq, errors[i]) for i, (seq, epoch) in enumerate(sampling) if i in errors and seq.running_epoch == epoch]


def end_failed(
    failed: list[tuple[Sequence, RowError]],
    output: dict[Owner, list[SequenceDelta]],
    remove: Callable[[Sequence], None],
) -> int:
    """End failed sequences, and put their last deltas where the ones with the meaningless tokens are.

    Returns:
        How many of them the model's logits are to blame for.
    """
    num_invalid_logits = 0
    for seq, error in failed:
        if error.code == "invalid_logits":
            num_invalid_logits += 1
        if seq.row >= 0:  # else that token was its last one
            remove(seq)
        deltas = output.setdefault(seq.owner, [])
        name = seq.request_id, seq.sequence_idx
        deltas[:] = [delta for delta in deltas if (delta.request_id, delta.sequence_idx) != name]
        deltas.append(seq.error_delta(error.reason, error.code))
    return num_invalid_logits
