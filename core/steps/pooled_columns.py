"""Moves a result's vectors into the deltas of the sequences that pool.

Such a sequence is prefill only. Elsewhere, its last chunk is treated as if it sampled a token that ends the sequence;
the two functions here replace that token by the vector. If a sequence has lost its row, its vector is dropped like a
token, and computed again.
"""

from msgspec.structs import replace

from penstock.core.sequences.sequence import Owner
from penstock.core.steps.plan_builder import Chunk, InFlightStep
from penstock.ipc.codec import unpack_int32
from penstock.ipc.messages import SequenceDelta, StepResult

_ITEM = 4  # bytes of an fp32


def check_pooled(step: InFlightStep, result: StepResult) -> str:
    """Return what is wrong with the sizes of a result's vectors; empty if they are right."""
    if len(result.pooled_sizes) != _ITEM * step.num_pooled:
        return f"{step.num_pooled} vectors are due, got sizes of {len(result.pooled_sizes) // _ITEM}"
    sizes = unpack_int32(result.pooled_sizes)
    if min(sizes) < 1 or _ITEM * sum(sizes) != len(result.pooled):
        return f"vectors of {sum(sizes)} numbers are due, got {len(result.pooled)} bytes"
    for chunk, size in zip(_pooling(step), sizes, strict=True):
        pooling = chunk.seq.request.sampling.pooling
        if pooling is not None and 0 < pooling.size < size:
            return f"a vector of at most {pooling.size} numbers is due, got {size}"
    return ""


def attach_pooled(step: InFlightStep, result: StepResult, output: dict[Owner, list[SequenceDelta]]) -> int:
    """Put vectors in the deltas of this result in place of tokens; return how many tokens were replaced.

    The result must have passed `check_pooled` and been applied: dropped vectors have no delta in `output`.
    """
    places = {
        (delta.request_id, delta.sequence_idx): (deltas, i)
        for deltas in output.values()
        for i, delta in enumerate(deltas)
    }
    num_tokens = first = 0
    for chunk, size in zip(_pooling(step), unpack_int32(result.pooled_sizes), strict=True):
        place = places.get((chunk.seq.request_id, chunk.seq.sequence_idx))
        if place is not None:
            deltas, i = place
            vector = result.pooled[_ITEM * first : _ITEM * (first + size)]
            deltas[i] = replace(deltas[i], token_ids=(), finish_reason="stop", pooled=vector)
            num_tokens += 1
        first += size
    return num_tokens


def _pooling(step: InFlightStep) -> list[Chunk]:
    return [chunk for chunk in step.chunks if chunk.samples and chunk.seq.request.sampling.pooling is not None]
