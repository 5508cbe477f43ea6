"""What a client is told of a sequence that the engine ended."""

from penstock.frontend.engine.queue_gate import retry_after
from penstock.frontend.errors import (
    ApiError,
    DeadlineExceeded,
    EndsWorkers,
    EngineFailed,
    GrammarFailed,
    InvalidLogits,
    InvalidRequest,
    Overloaded,
)
from penstock.ipc.messages import EngineStats, SequenceDelta


def failure_of(delta: SequenceDelta, stats: EngineStats | None, num_seqs: int, num_tokens: int) -> ApiError:
    """The error of a request of so many sequences and prompt tokens that the engine did not serve."""
    if delta.error_code == "queue_full":
        return Overloaded(delta.error, retry_after=retry_after(stats, num_seqs, num_tokens))
    if delta.error_code == "queue_timeout":
        return DeadlineExceeded(delta.error)
    if delta.error_code == "too_long":
        return InvalidRequest(delta.error)
    if delta.error_code == "grammar":
        return GrammarFailed(delta.error)
    if delta.error_code == "invalid_logits":
        return InvalidLogits(delta.error)
    if delta.error_code == "ends_workers":
        return EndsWorkers(delta.error)
    if delta.finish_reason == "abort":
        return EngineFailed("the engine aborted the request")
    return EngineFailed(f"the engine failed on this request: {delta.error}" if delta.error else "the engine failed")
