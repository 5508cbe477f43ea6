"""The host's side of a step: the batch is read from the plan, and the result is made from what the device sends."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from penstock.gpu_worker.devices.device import Download, Int32Array, Mark
from penstock.ipc.messages import RowError, StepPlan, StepResult
from penstock.kernels.sampling.sampling_state import NOT_FINITE, NOTHING_LEFT

_REASONS = {
    NOT_FINITE: "the model's logits are not finite numbers: its weights are damaged, or --dtype is too narrow for it",
    NOTHING_LEFT: "all of the model's logits are minus infinity, possibly because of the request's limits on tokens",
}

_TOP_BYTE = 3 if sys.byteorder == "little" else 0
"""Where the sign of an int32 is."""


Put = Callable[[StepResult, bytes], StepResult]
"""Returns a result with what a part of the worker has sent beside the tokens, as bytes."""


class HostBatch(NamedTuple):
    """A plan's batch as arrays (N rows, S of them sample)."""

    rows: Int32Array  # [N]
    start: Int32Array  # [N]
    num_new: Int32Array  # [N]
    sample_idx: npt.NDArray[np.int64]  # [S], indices into the batch
    paths: Int32Array | None = (
        None  # [N, 1 + D], as in `paged_attention`, if there are trees; their rows have one token
    )
    places: Int32Array | None = None  # [N], with trees: where each row's tokens are; differs from `start` for nodes

    @property
    def start_places(self) -> Int32Array:
        """int32[N], where the rows' first tokens, keys and values are."""
        return self.start if self.places is None else self.places


class TokenScores(NamedTuple):
    """The log-probabilities of K tokens (column 0), and of the most likely tokens at their positions (the others)."""

    token_ids: Tensor  # int32[K, 1 + n]
    logprobs: Tensor  # fp32[K, 1 + n]
    ranks: Tensor  # int32[K]

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """All parts as int32, in the order in which they are sent."""
        return self.token_ids, self.logprobs.view(torch.int32), self.ranks


class StepOutput(NamedTuple):
    """Everything that a step sends to the host, as int32."""

    values: Tensor  # int32[sum of the sizes]
    sizes: tuple[int, ...] = ()  # bytes of each part, as in `StepResult` without its times; empty: only token ids


def host_batch(plan: StepPlan) -> HostBatch:
    """View the plan's buffers as arrays."""
    return HostBatch(
        np.frombuffer(plan.rows, dtype=np.int32),
        np.frombuffer(plan.start, dtype=np.int32),
        np.frombuffer(plan.num_new, dtype=np.int32),
        np.frombuffer(plan.samples, dtype=np.uint8).nonzero()[0],
    )


def pack(tokens: Tensor | None, drawn: TokenScores | None, prompt: TokenScores | None) -> StepOutput | None:
    """Put a step's results into one tensor, so that one transfer is enough."""
    if drawn is None and prompt is None:
        return None if tokens is None else StepOutput(tokens)
    like = drawn or prompt
    assert like is not None
    nothing = like.ranks[:0]
    parts = [
        nothing if tokens is None else tokens,
        *((nothing,) * 3 if drawn is None else drawn.parts),
        *((nothing,) * 3 if prompt is None else prompt.parts),
    ]
    return StepOutput(torch.cat([part.flatten() for part in parts]), tuple(4 * part.numel() for part in parts))


class Passed(NamedTuple):
    """What a stage that draws no tokens passes on."""

    hidden: Tensor  # [T, H]
    rows: Int32Array  # [S'], the rows for which the last stage draws tokens
    positions: Int32Array  # [S'], where the drawn tokens go
    note: Callable[[Download], None] | None  # for a step with drafts: takes all drawn tokens


class PendingStep(Struct, frozen=True):
    """A launched step whose tokens are on their way."""

    step_id: int
    output: Download | None  # None if there is no output: only the end of the step matters
    sizes: tuple[int, ...]  # of the output's parts, as `make_result` takes them
    began: Mark
    ended: Mark
    ended_before: Mark | None  # the end of the step before
    row_errors: tuple[RowError, ...] = ()
    finish: Callable[[StepResult, tuple[RowError, ...]], StepResult] | None = None  # for a step with drafts
    computing: Mark | None = None  # the end of its copies to and from the host, if it has any
    take_copy_times: Callable[[], tuple[int, int]] | None = None
    passed: Passed | None = None
    sent: tuple[tuple[int, Put], ...] = ()  # by parts, at the end of the output: the bytes of each, and where they go

    @property
    def num_us_if_done(self) -> int | None:
        """How long the step took; None while the device is computing."""
        return self.ended.us_since(self.computing or self.began) if self.ended.is_passed() else None

    @property
    def tokens(self) -> bytes:
        """int32[S'], all drawn tokens, before wrong ones are dropped; blocks until they are there."""
        values = self._values[0]
        return values[: self.sizes[0]] if self.sizes else values

    @property
    def _values(self) -> tuple[bytes, bytes]:
        """All that has come to the host: what the step itself has sent, and what parts have sent."""
        values = b"" if self.output is None else self.output.wait()
        if not self.sent:
            return values, b""
        end = len(values) - sum(size for size, _ in self.sent)
        return values[:end], values[end:]

    def is_ready(self) -> bool:
        """Whether `result` would return immediately."""
        return self.ended.is_passed() if self.output is None else self.output.is_ready()

    def result(self) -> StepResult:
        """The step's result; blocks until the device has computed it."""
        self.ended.wait()
        values, rest = self._values
        num_idle_us = 0 if self.ended_before is None else self.began.us_since(self.ended_before)
        result = make_result(
            self.step_id, values, self.sizes, self.ended.us_since(self.computing or self.began), num_idle_us
        )
        for size, put in self.sent:
            result, rest = put(result, rest[:size]), rest[size:]
        if self.take_copy_times is not None:
            num_pages, num_us = self.take_copy_times()
            if num_pages:
                result = replace(result, num_copied_pages=num_pages, num_copy_us=num_us)
        if self.finish is not None:
            return self.finish(result, self.row_errors)
        token_ids, undrawn = drawn_tokens(result.token_ids)
        if self.row_errors or undrawn:
            return replace(result, token_ids=token_ids, row_errors=self.row_errors + undrawn)
        return result


def make_result(step_id: int, values: bytes, sizes: tuple[int, ...], forward_us: int, idle_us: int) -> StepResult:
    """Split what `pack` joined, on the host."""
    if not sizes:
        return StepResult(step_id, values, forward_us, idle_us)
    ends = np.cumsum(sizes).tolist()
    tokens, *drawn_and_prompt = (values[end - size : end] for size, end in zip(sizes, ends, strict=True))
    ids, logprobs, ranks, prompt_ids, prompt_logprobs, prompt_ranks = drawn_and_prompt
    return StepResult(
        step_id,
        tokens,
        forward_us,
        idle_us,
        logprob_ids=ids,
        logprobs=logprobs,
        logprob_ranks=ranks,
        prompt_logprob_ids=prompt_ids,
        prompt_logprobs=prompt_logprobs,
        prompt_logprob_ranks=prompt_ranks,
    )


def drawn_tokens(token_ids: bytes) -> tuple[bytes, tuple[RowError, ...]]:
    """Separate a step's tokens from the codes in place of missing ones.

    Args:
        token_ids: int32[S], of the sampling rows, as `kernels/sampling/sampling.py` returns them.

    Returns:
        (int32[S], with 0 where there is no token; an error for each such row).
    """
    if token_ids[_TOP_BYTE::4].isascii():  # true if no number is negative: checks only the sign bits
        return token_ids, ()
    tokens = np.frombuffer(token_ids, dtype=np.int32)
    errors = [RowError(i, _REASONS[int(tokens[i])], "invalid_logits") for i in np.flatnonzero(tokens < 0).tolist()]
    return tokens.clip(min=0).tobytes(), tuple(errors)
