"""A row for which no token could be drawn ends its sequence: with an error, in place of the token."""

from collections.abc import Callable

from penstock.core.sequences.sequence import Owner, Sequence
from penstock.core.steps.plan_builder import InFlightStep
from penstock.ipc.messages import RowError, SequenceDelta, StepResult


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
        deltas = output[seq.owner]
        for i, delta in enumerate(deltas):
            if delta.request_id == seq.request_id and delta.sequence_idx == seq.sequence_idx:
                deltas[i] = seq.error_delta(error.reason, error.code)
    return num_invalid_logits
