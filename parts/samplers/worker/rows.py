"""Rows with samplers of their own: their logits pass through these, one row after the other, before tokens are drawn.

The kernels then draw from the softmax of what is left: for them, such a row has a temperature of 1 and no filters.
Samplers run on the device, and depend on a row's tokens, its seed and the position alone. So tokens are the same
whatever else is in the batch, after a preemption and after a death, and with drafts: a guess's position sees the
guesses before it as tokens.

A sampler may also keep a number of a row, which its tokens do not say: it depends on what they were drawn from. After
each draw the number goes to the host with the token, and comes back when the sequence enters a row again.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import structlog
import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.config.samplers import Draw, Sampler, samplers
from penstock.gpu_worker.devices.device import Int32Array, IntArray
from penstock.gpu_worker.part import Context
from penstock.gpu_worker.steps.row_part import RowPart, Sent
from penstock.ipc.messages import NewRow, RowError, SamplerUse, StepPlan, StepResult
from penstock.kernels.sampling.philox import philox_reference
from penstock.parts.samplers.options import SamplerOptions
from penstock.parts.samplers.worker.processors import Factory, Processor, ProcessorError, load

log = structlog.get_logger()

_NO_TOKEN = 2**33
"""Of which no vocabulary has as many: randomness of a position that is not a token's noise."""


_Step = Callable[[Tensor, Draw], Tensor]


class _Row(NamedTuple):
    steps: ListOf[_Step]
    seed: int
    num_prompt_tokens: int
    stop_token_ids: ListOf[int]  # not drawn before `min_len`
    min_len: int
    keeper: tuple[type[Sampler], tuple[float, ...]] | None  # the last sampler with its values, if it keeps something
    states: dict[int, Tensor]  # what it keeps, fp32[], by the position of the next token: with drafts, of several


class _Draw(NamedTuple):
    """A draw for a row that keeps something."""

    sample: int  # among the step's draws
    row: _Row
    number: int  # the row's
    position: int
    state: Tensor
    z: Tensor  # fp32[V], what its token is drawn from


class SamplerRows(RowPart):
    """The rows that have samplers."""

    def __init__(self, device: torch.device, processors: Mapping[str, Factory] = MappingProxyType({})) -> None:
        """`processors`: those that requests may ask for, by name."""
        self._device = device
        self._processors = processors
        self.rows: dict[int, _Row] = {}
        self._keeping: list[_Draw] = []
        self._num_draws = 0
        self._token_ids: Tensor | None = None

    @classmethod
    def of(cls, context: Context) -> "SamplerRows":
        return cls(context.device.torch_device, load(context.config.of(SamplerOptions).places))

    def clear(self) -> None:
        """Forget all rows."""
        self.rows.clear()
        self._keeping = []

    def enter(self, plan: StepPlan) -> None:
        if self.rows and plan.freed_rows:
            for row in np.frombuffer(plan.freed_rows, dtype=np.int32).tolist():
                self.rows.pop(row, None)
        for new in plan.new_rows:
            if new.sampling.samplers:
                self.rows[new.row] = _row(new, self._processors, self._device)
            elif self.rows:
                self.rows.pop(new.row, None)

    def shape(self, logits: Tensor, rows: Int32Array, positions: IntArray, token_ids: Tensor) -> tuple[RowError, ...]:
        errors = []
        self._keeping, self._num_draws, self._token_ids = [], logits.shape[0], token_ids
        for i, (number, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            if (row := self.rows.get(number)) is None:
                continue
            try:
                state = None if row.keeper is None else self._state(row, number, position)
                z = _shaped(logits[i].float(), row, token_ids[number, :position], position, state)
                logits[i] = z
                if state is not None:
                    self._keeping.append(_Draw(i, row, number, position, state, z))
            except Exception as error:
                if not logits[i].max().isfinite():
                    continue  # there is no distribution: the draw says so
                log.exception("sampler failed")
                reason = f"a sampler failed: {type(error).__name__}: {str(error)[:200]}"
                if isinstance(error, ProcessorError):
                    reason = str(error)
                errors.append(RowError(i, reason, "internal"))
        return tuple(errors)

    def sends(self) -> Sent | None:
        """What samplers keep of each row after its draw."""
        keeping, self._keeping = self._keeping, []
        if not keeping:
            return None
        for draw in keeping:
            draw.row.states.clear()
        after = [self._after(draw) for draw in keeping]
        for draw, state in zip(keeping, after, strict=True):
            draw.row.states[draw.position + 1] = state
        column = after[0].new_zeros(self._num_draws)
        column[[draw.sample for draw in keeping]] = torch.stack(after)
        return Sent(_with_states, column.view(torch.int32))

    def _state(self, row: _Row, number: int, position: int) -> Tensor:
        """fp32[], what the row's sampler keeps before the draw at a position, which may follow one of this step."""
        before = self._keeping[-1] if self._keeping else None
        if before is not None and (before.number, before.position) == (number, position - 1):
            return self._after(before)  # if its guess is right, which is its token now
        return row.states[position]

    def _after(self, draw: _Draw) -> Tensor:
        """fp32[], what is kept after the token that stands at the draw's position."""
        assert draw.row.keeper is not None
        assert self._token_ids is not None
        token = self._token_ids[draw.number, draw.position].long().clamp(min=0)  # negative if none could be drawn
        keeper, values = draw.row.keeper
        return torch.as_tensor(keeper.kept(draw.z, values, draw.state, token))


def _with_states(result: StepResult, states: bytes) -> StepResult:
    return replace(result, sampler_states=states)


def _row(new: NewRow, processors: Mapping[str, Factory], device: torch.device) -> _Row:
    params = new.sampling
    steps = [_step(use, processors) for use in params.samplers]
    last = params.samplers[-1]
    kind = None if last.arguments else samplers().get(last.name)
    keeper, states = None, {}
    if kind is not None and kind.keeps:
        keeper = kind, last.values
        kept = kind.first_state(last.values) if new.sampler_state is None else new.sampler_state
        states[len(new.token_ids) // 4] = torch.tensor(kept, dtype=torch.float32, device=device)
    min_len = new.num_prompt_tokens + params.min_tokens
    return _Row(steps, params.seed, new.num_prompt_tokens, params.stop_token_ids, min_len, keeper, states)


def _step(use: SamplerUse, processors: Mapping[str, Factory]) -> _Step:
    if use.arguments:
        return Processor(use.name, processors.get(use.name), use.arguments).apply
    kind = samplers().get(use.name)
    return partial(_missing, use.name) if kind is None else partial(_applied, kind, use.values)


def _applied(kind: type[Sampler], values: tuple[float, ...], z: Tensor, draw: Draw) -> Tensor:
    return torch.as_tensor(kind.apply(z, values, draw))


def _missing(name: str, _z: Tensor, _draw: Draw) -> Tensor:
    raise LookupError(f"the worker has no sampler {name!r}")


def _shaped(z: Tensor, row: _Row, token_ids: Tensor, position: int, state: Tensor | None) -> Tensor:
    """One row's logits, fp32[V], after all its samplers."""
    if position < row.min_len and row.stop_token_ids:  # first, since filters must leave other tokens
        stops = torch.tensor(row.stop_token_ids, device=z.device)
        z = z.index_fill(0, stops, -torch.inf)
    draw = Draw(token_ids, row.num_prompt_tokens, partial(_uniform, row.seed, position), state)
    for step in row.steps:
        z = step(z, draw)
    return z


def _uniform(seed: int, position: int) -> float:
    return ((philox_reference(seed, position, _NO_TOKEN) >> 9) + 0.5) / 2**23
