"""Moves what samplers keep of rows into the sequences, and into their deltas.

A sampler may keep a number of a row that its tokens alone do not say (`config/samplers.py`). It travels with the tokens
that it belongs to: a sequence that enters a row again, here or under another scheduler, continues with it.
"""

from msgspec.structs import replace

from penstock.core.sequences.sequence import Owner, Sequence
from penstock.core.steps.plan_builder import InFlightStep
from penstock.ipc.messages import SequenceDelta, StepResult

_ITEM = 4  # bytes of an fp32


def keeps_state(seq: Sequence) -> bool:
    """Whether a sampler may keep something of the sequence."""
    return bool(seq.request.sampling.samplers)


def check_sampler_states(step: InFlightStep, result: StepResult) -> str:
    """Return what is wrong with the size of a result's states; empty if it is right."""
    if len(result.sampler_states) == _ITEM * step.num_samples:
        return ""
    return f"step {step.step_id} samples {step.num_samples} rows, got {len(result.sampler_states)} bytes of states"


def attach_sampler_states(step: InFlightStep, result: StepResult, output: dict[Owner, list[SequenceDelta]]) -> None:
    """Give sequences and their deltas what samplers keep of them.

    The result must have been applied: dropped tokens have no delta in `output`.
    """
    states = memoryview(result.sampler_states).cast("f")
    sampling = [*step.decodes.seqs, *(chunk.seq for chunk in step.chunks if chunk.samples)]
    found = {(seq.request_id, seq.sequence_idx): (seq, state) for seq, state in zip(sampling, states, strict=True)}
    for deltas in output.values():
        for i, delta in enumerate(deltas):
            if not delta.token_ids or (delta.request_id, delta.sequence_idx) not in found:
                continue
            seq, state = found[delta.request_id, delta.sequence_idx]
            if keeps_state(seq):
                seq.sampler_state = state
                deltas[i] = replace(delta, sampler_state=state)
