"""Rows with samplers of their own: their logits pass through these, one row after the other, before tokens are drawn.

The kernels then draw from the softmax of what is left: for them, such a row has a temperature of 1 and no filters.
Samplers run on the device, and depend on a row's tokens, its seed and the position alone. So tokens are the same
whatever else is in the batch, after a preemption and after a death, and with drafts: a guess's position sees the
guesses before it as tokens.
"""

from collections.abc import Sequence as ListOf
from functools import partial
from typing import NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from penstock.config.samplers import Draw, Sampler, samplers
from penstock.gpu_worker.devices.device import Int32Array, IntArray
from penstock.gpu_worker.part import Context
from penstock.gpu_worker.steps.row_part import RowPart
from penstock.ipc.messages import NewRow, RowError, StepPlan
from penstock.kernels.sampling.philox import philox_reference

log = structlog.get_logger()

_NO_TOKEN = 2**33
"""Of which no vocabulary has as many: randomness of a position that is not a token's noise."""


class _Row(NamedTuple):
    steps: ListOf[tuple[type[Sampler] | None, str, tuple[float, ...]]]
    seed: int
    num_prompt_tokens: int
    stop_token_ids: ListOf[int]  # not drawn before `min_len`
    min_len: int


class SamplerRows(RowPart):
    """The rows that have samplers."""

    def __init__(self) -> None:
        self.rows: dict[int, _Row] = {}

    @classmethod
    def of(cls, context: Context) -> "SamplerRows":
        return cls()

    def clear(self) -> None:
        """Forget all rows."""
        self.rows.clear()

    def enter(self, plan: StepPlan) -> None:
        if self.rows and plan.freed_rows:
            for row in np.frombuffer(plan.freed_rows, dtype=np.int32).tolist():
                self.rows.pop(row, None)
        for new in plan.new_rows:
            if new.sampling.samplers:
                self.rows[new.row] = _row(new)
            elif self.rows:
                self.rows.pop(new.row, None)

    def shape(self, logits: Tensor, rows: Int32Array, positions: IntArray, token_ids: Tensor) -> tuple[RowError, ...]:
        errors = []
        for i, (number, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            if (row := self.rows.get(number)) is None:
                continue
            try:
                logits[i] = _shaped(logits[i].float(), row, token_ids[number, :position], position)
            except Exception as error:
                if not logits[i].max().isfinite():
                    continue  # there is no distribution: the draw says so
                log.exception("sampler failed")
                reason = f"a sampler failed: {type(error).__name__}: {str(error)[:200]}"
                errors.append(RowError(i, reason, "internal"))
        return tuple(errors)


def _row(new: NewRow) -> _Row:
    params = new.sampling
    return _Row(
        [(samplers().get(use.name), use.name, use.values) for use in params.samplers],
        params.seed,
        new.num_prompt_tokens,
        params.stop_token_ids,
        new.num_prompt_tokens + params.min_tokens,
    )


def _shaped(z: Tensor, row: _Row, token_ids: Tensor, position: int) -> Tensor:
    """One row's logits, fp32[V], after all its samplers."""
    if position < row.min_len and row.stop_token_ids:  # first, since filters must leave other tokens
        stops = torch.tensor(row.stop_token_ids, device=z.device)
        z = z.index_fill(0, stops, -torch.inf)
    draw = Draw(token_ids, row.num_prompt_tokens, partial(_uniform, row.seed, position))
    for sampler, name, values in row.steps:
        if sampler is None:
            raise LookupError(f"the worker has no sampler {name!r}")
        z = sampler.apply(z, values, draw)
    return z


def _uniform(seed: int, position: int) -> float:
    return ((philox_reference(seed, position, _NO_TOKEN) >> 9) + 0.5) / 2**23


PARTS = (SamplerRows,)
