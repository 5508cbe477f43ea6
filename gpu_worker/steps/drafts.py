"""Steps with drafts: how their rows are computed, and how many tokens each returns.

Each position whose logits are needed becomes its own row of the batch, with the drafts before it in the row's token
buffer, so the same code computes and samples it as for a decode. What a position samples depends on the seed and the
position, never on a guess. The first token counts, and each further one counts as long as the guess before it equals
the token sampled there. A row with a grammar is masked for one token only: its drafts are ignored.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from penstock.gpu_worker.devices.device import Download, IntArray
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.host_step import HostBatch, drawn_tokens
from penstock.ipc.messages import RowError, StepPlan, StepResult

_NO_DRAFT = -(2**31)


class DraftedStep:
    """What is needed to judge the draws of one step (S' of them)."""

    def __init__(self, rows: IntArray, positions: IntArray, sizes: IntArray, draft_ids: IntArray) -> None:
        """For the S sampling rows of the plan: the row, where its first token goes, and its number of draws."""
        self._rows = rows
        self._positions = positions
        self._row_of = np.repeat(np.arange(rows.shape[0]), sizes)
        self._first = sizes.cumsum() - sizes
        self._within = np.arange(self._row_of.shape[0]) - self._first[self._row_of]
        self._expected = np.full(self._row_of.shape[0], _NO_DRAFT, dtype=np.int32)
        self._expected[self._within < (sizes - 1)[self._row_of]] = draft_ids
        self.asking = rows[:0]  # int[A']: the draws of rows that want log-probabilities
        self.download: Download | None = None  # begins with int32[S'], the sampled tokens
        self.is_noted = False

    def note(self, next_position: IntArray) -> None:
        """Write each row's next position into int[R]; blocks until the device has sampled."""
        if not self.is_noted and self.download is not None:
            drawn = np.frombuffer(self.download.wait(), dtype=np.int32, count=self._row_of.shape[0])
            next_position[self._rows] = self._positions + self._counts(drawn) - 1
            self.is_noted = True

    def trimmed(self, result: StepResult, row_errors: tuple[RowError, ...]) -> StepResult:
        """Keep only what counts of a result that contains all draws."""
        drawn = np.frombuffer(result.token_ids, dtype=np.int32)
        counts = self._counts(drawn)
        counted = self._within < counts[self._row_of]
        token_ids, undrawn = drawn_tokens(drawn[counted].tobytes())
        errors = [replace(error, sample_idx=int(self._row_of[error.sample_idx])) for error in row_errors]
        errors += [replace(error, sample_idx=int(self._row_of[counted][error.sample_idx])) for error in undrawn]
        scored = counted[self.asking]
        columns = (result.logprob_ids, result.logprobs, result.logprob_ranks)
        ids, logprobs, ranks = (_chosen(column, scored) for column in columns)
        return replace(
            result,
            token_ids=token_ids,
            num_tokens=counts.astype(np.int32).tobytes(),
            row_errors=tuple(errors),
            logprob_ids=ids,
            logprobs=logprobs,
            logprob_ranks=ranks,
        )

    def _counts(self, drawn: IntArray) -> IntArray:
        """How many tokens each sampling row returns; 1 also where none could be sampled."""
        num_draws = drawn.shape[0]
        wrong = np.where(drawn == self._expected, num_draws, np.arange(num_draws))  # a row's last draw is always wrong
        counts = np.minimum.reduceat(wrong, self._first) - self._first + 1
        # A failed draw ends its row if it is the first one; otherwise the next step will reach it again.
        counts -= (counts > 1) & (drawn[self._first + counts - 1] < 0)
        return counts


class Drafts:
    """Next positions of rows after steps with drafts, which the scheduler does not know before their results."""

    def __init__(self, state: RowState, num_rows: int, has_grammar: Callable[[int], bool]) -> None:
        self._state = state
        self._has_grammar = has_grammar
        self._next_position = np.zeros(num_rows, dtype=np.int64)
        self._steps: deque[DraftedStep] = deque()  # those whose results may not be known yet

    def expand(self, plan: StepPlan, batch: HostBatch) -> tuple[HostBatch, DraftedStep | None]:
        """Write a plan's drafts into the token buffers; return the batch to compute, and how to judge its draws.

        If a start is a bound, this waits for the draws of the steps before.
        """
        num_rows = batch.rows.shape[0]
        start, num_drafts = batch.start.copy(), np.zeros(num_rows, dtype=np.int32)
        if plan.start_bounds:
            while self._steps:
                self._steps.popleft().note(self._next_position)
            bounds = np.frombuffer(plan.start_bounds, dtype=np.uint8).nonzero()[0]
            start[bounds] = self._next_position[batch.rows[bounds]]
        draft_ids = np.frombuffer(plan.draft_token_ids, dtype=np.int32)
        if plan.num_drafts:
            num_drafts = np.frombuffer(plan.num_drafts, dtype=np.int32)
        num_new = batch.num_new - num_drafts
        left_alone = [bool(count) and self._has_grammar(row) for row, count in zip(batch.rows, num_drafts, strict=True)]
        draft_ids = draft_ids[~np.repeat(left_alone, num_drafts)]
        num_drafts = np.where(left_alone, 0, num_drafts)
        drafted = num_drafts.nonzero()[0]
        if drafted.shape[0]:
            self._state.write_tokens(batch.rows[drafted], start[drafted] + 1, num_drafts[drafted], draft_ids.tobytes())
        sizes = 1 + num_drafts
        index = np.repeat(np.arange(num_rows), sizes)
        within = np.arange(index.shape[0]) - np.repeat(sizes.cumsum() - sizes, sizes)
        samples = np.zeros(num_rows, dtype=np.bool_)
        samples[batch.sample_idx] = True
        expanded = HostBatch(
            batch.rows[index], (start[index] + within).astype(np.int32), num_new[index], samples[index].nonzero()[0]
        )
        if not batch.sample_idx.shape[0]:
            return expanded, None
        step = DraftedStep(batch.rows[samples], (start + num_new)[samples], sizes[samples], draft_ids)
        if self._state.has_logprobs:
            step.asking = (self._state.num_logprobs[expanded.rows[expanded.sample_idx]] >= 0).nonzero()[0]
        while self._steps and self._steps[0].is_noted:
            self._steps.popleft()
        self._steps.append(step)
        return expanded, step

    def finish(self, step: DraftedStep, result: StepResult, row_errors: tuple[RowError, ...]) -> StepResult:
        """Return the final result of a step that the device has computed."""
        step.note(self._next_position)
        return step.trimmed(result, row_errors)

    def clear(self) -> None:
        """Forget all rows."""
        self._steps.clear()


def _chosen(column: bytes, rows: npt.NDArray[np.bool_]) -> bytes:
    """From a column with one part per row, return the parts of the chosen rows."""
    return np.frombuffer(column, dtype=np.int32).reshape(rows.shape[0], -1)[rows].tobytes() if column else column
