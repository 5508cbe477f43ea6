"""A row for which no token could be drawn ends its sequence: with an error, in place of the token."""

from collections.abc import Callable

from penstock.core.plan_builder import InFlightStep
from penstock.core.sequence import Owner, Sequence
from penstock.ipc.messages import SequenceDelta, StepResult


def failed_sequences(step: InFlightStep, result: StepResult) -> list[tuple[Sequence, str]]:
    """Return the failed sequences that live on in the epoch of the step, each with the reason.

    To be asked before the result is applied; the result has passed `checked_tokens`.
    """
    sampling = [
        *zip(step.decodes.seqs, step.decodes.epochs, strict=True),
        *((chunk.seq, chunk.epoch) for chunk in step.chunks if chunk.samples),
    ]
    reasons = {error.sample_idx: error.reason for error in result.row_errors}  # one end for each
    return [(seq, reasons[i]) for i, (seq, epoch) in enumerate(sampling) if i in reasons and seq.running_epoch == epoch]


def end_failed(
    failed: list[tuple[Sequence, str]], output: dict[Owner, list[SequenceDelta]], remove: Callable[[Sequence], None]
) -> None:
    """End failed sequences, and put their last deltas where the ones with the meaningless tokens are."""
    for seq, reason in failed:
        if seq.row >= 0:  # else that token was its last one
            remove(seq)
        deltas = output[seq.owner]
        for i, delta in enumerate(deltas):
            if delta.request_id == seq.request_id and delta.sequence_idx == seq.sequence_idx:
                deltas[i] = seq.error_delta(reason, "grammar")
