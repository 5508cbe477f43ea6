"""A result is held against the step that it claims to be of, before it changes anything."""

from collections import deque

from penstock.core.steps.logprobs import check_logprobs
from penstock.core.steps.plan_builder import InFlightStep
from penstock.ipc.int32_buffer import unpack_int32
from penstock.ipc.messages import StepResult


class UnexpectedResultError(ValueError):
    """A result that is not for the oldest step in flight, or not of its size. Nothing was changed."""


def checked_tokens(in_flight: deque[InFlightStep], result: StepResult, vocab_size: int) -> list[int]:
    """Return a result's tokens, in the order of the sampling rows of the oldest step in flight.

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
    if len(tokens) != step.num_samples:
        raise UnexpectedResultError(f"step {result.step_id} samples {step.num_samples} rows, got {len(tokens)} tokens")
    if tokens and max(tokens) >= vocab_size:
        raise UnexpectedResultError(
            f"step {result.step_id} brings a token outside the vocabulary of {vocab_size} tokens"
        )
    if step.has_logprobs and (error := check_logprobs(step, result)):
        raise UnexpectedResultError(error)
    for row_error in result.row_errors:
        if not 0 <= row_error.sample_idx < step.num_samples:
            raise UnexpectedResultError(
                f"step {result.step_id} samples {step.num_samples} rows, got an error of row {row_error.sample_idx}"
            )
    return tokens
