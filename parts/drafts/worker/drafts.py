"""Steps with drafts: how their rows are computed, and how many tokens each returns.

Each position that needs logits becomes a row of its own in the batch, and the drafts before it are in the row's token
buffer. So the same code computes and samples it as for a decode. What a position samples depends on the seed and the
position, never on a guess. The first token counts. Each further token counts as long as the guess before it equals the
token sampled there. If the guesses form a tree (`trees.py`), the draws of one path count.
"""

from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from penstock.gpu_worker.devices.device import Download, Int32Array, IntArray
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.host_step import HostBatch, drawn_tokens
from penstock.gpu_worker.steps.row_part import RowPart
from penstock.ipc.messages import NewRow, RowError, StepPlan, StepResult
from penstock.parts.drafts.worker.drafter import Drafter
from penstock.parts.drafts.worker.guessing import Guessing
from penstock.parts.drafts.worker.trees import DraftTree, Moves, path_table, positions_of, trees_of

_NO_DRAFT = -(2**31)
_NO_TREES: Mapping[int, DraftTree] = {}


class Spread(NamedTuple):
    """Consecutive entries, one run of them for each of N rows; T entries in all."""

    row_of: IntArray  # [T]
    first: IntArray  # [N]
    within: IntArray  # [T], the index of each entry in its row's run


def spread(sizes: IntArray) -> Spread:
    """`sizes`: how many entries each of N rows has, at least 1."""
    first = sizes.cumsum() - sizes
    row_of = np.arange(sizes.shape[0]).repeat(sizes)
    return Spread(row_of, first, np.arange(row_of.shape[0]) - first[row_of])


class DraftedStep:
    """What is needed to judge the draws of one step (S' of them)."""

    def __init__(
        self,
        rows: IntArray,
        positions: IntArray,
        sizes: IntArray,
        draft_ids: IntArray,
        trees: Mapping[int, DraftTree] = _NO_TREES,
        draws: Spread | None = None,
    ) -> None:
        """For each of the plan's S sampling rows: the row, where its first token goes, and its number of draws.

        `trees`: those of some sampling rows, by index in S. `draws`: `spread(sizes)`, if the caller has it already.
        """
        self._rows = rows
        self._positions = positions
        self._sizes = sizes
        self._trees = trees
        self._draws = spread(sizes) if draws is None else draws
        row_of = self._draws.row_of
        self.guesses: Int32Array = np.empty(row_of.shape[0], dtype=np.int32)  # [S'], the guess after each draw
        self.guesses.fill(_NO_DRAFT)
        self.guesses[:-1][row_of[1:] == row_of[:-1]] = draft_ids
        self.asking = rows[:0]  # int[A']: the draws for rows that want log-probabilities
        self.num_draft_us = 0
        self._set = frozenset(rows.tolist())
        self._gone: set[int] = set()  # rows that other sequences have taken since
        self._judged: tuple[npt.NDArray[np.bool_], IntArray] | None = None
        self.download: Download | None = None  # begins with int32[S'], the sampled tokens
        self.is_noted = False
        self.of: Drafts | None = None

    def drawn(self, tokens: Download) -> None:
        """See `Expanded`."""
        assert self.of is not None
        self.of.drawn(self, tokens)

    def finish(self, result: StepResult, row_errors: tuple[RowError, ...]) -> StepResult:
        """See `Expanded`."""
        assert self.of is not None
        return self.of.finish(self, result, row_errors)

    def leave(self, rows: IntArray) -> None:
        """Note that other sequences have taken these rows."""
        self._gone |= self._set.intersection(rows.tolist())

    def has_any(self, rows: IntArray) -> bool:
        """Whether the step draws for one of these rows."""
        return not self._set.isdisjoint(rows.tolist())

    def note(self, state: RowState, next_position: IntArray, moves: Moves | None = None) -> None:
        """Record the tokens and rows' next positions, int[R], on the host; blocks until the device has sampled."""
        if self.is_noted or self.download is None:
            return
        drawn = np.frombuffer(self.download.wait(), dtype=np.int32, count=self.guesses.shape[0])
        is_right, counts = self._judge(drawn)
        if not (self._gone or self._trees or state.mirror is not None):  # the usual case
            next_position[self._rows] = self._positions + counts - 1
            self.is_noted = True
            return
        is_there = np.array([row not in self._gone for row in self._rows.tolist()], dtype=np.bool_)
        next_position[self._rows[is_there]] = (self._positions + counts - 1)[is_there]
        if state.mirror is not None:
            row_of = self._draws.row_of[is_right]
            positions = self._positions[row_of] + np.arange(row_of.shape[0]) - (counts.cumsum() - counts)[row_of]
            is_live = is_there[row_of]
            state.mirror[self._rows[row_of][is_live], positions[is_live]] = drawn[is_right][is_live]
        for i, tree in self._trees.items():
            if moves is not None and is_there[i]:
                its = self._draws_of(i)
                moves.add(tree, is_right[its].nonzero()[0].tolist(), drawn[its].tolist())
        self.is_noted = True

    def stopped(self, stop_token_ids: Mapping[int, frozenset[int]]) -> list[int]:
        """The rows that drew one of their stop tokens and still hold the same sequence. Call this after `note`."""
        if self.download is None:
            return []
        drawn = np.frombuffer(self.download.wait(), dtype=np.int32, count=self.guesses.shape[0])
        is_right, _ = self._judge(drawn)
        rows = self._rows[self._draws.row_of[is_right]].tolist()
        found = zip(rows, drawn[is_right].tolist(), strict=True)
        return [row for row, token in found if token in stop_token_ids.get(row, ()) and row not in self._gone]

    def trimmed(self, result: StepResult, row_errors: tuple[RowError, ...]) -> StepResult:
        """Reduce a result with all draws to the draws that count."""
        drawn = np.frombuffer(result.token_ids, dtype=np.int32)
        counted, counts = self._judge(drawn)
        token_ids, undrawn = drawn_tokens(drawn[counted].tobytes())
        result = replace(
            result,
            token_ids=token_ids,
            num_tokens=counts.astype(np.int32).tobytes(),
            num_drafted=(self._sizes - 1).astype(np.int32).tobytes(),
            num_draft_us=self.num_draft_us,
        )
        if row_errors or undrawn:
            row_of = self._draws.row_of
            errors = [replace(error, sample_idx=int(row_of[error.sample_idx])) for error in row_errors]
            errors += [replace(error, sample_idx=int(row_of[counted][error.sample_idx])) for error in undrawn]
            result = replace(result, row_errors=tuple(errors))
        if result.logprob_ids:
            scored = counted[self.asking]
            columns = (result.logprob_ids, result.logprobs, result.logprob_ranks)
            ids, logprobs, ranks = (_chosen(column, scored) for column in columns)
            result = replace(result, logprob_ids=ids, logprobs=logprobs, logprob_ranks=ranks)
        if result.num_forced:
            told = np.frombuffer(result.num_forced, dtype=np.int32)[self._draws.first]
            forced = np.where(counts == self._sizes, told, 0).astype(np.int32)
            result = replace(result, num_forced=forced.tobytes())
        if result.sampler_states:  # those after each row's last draw that counts; its guesses are a chain
            after = np.frombuffer(result.sampler_states, dtype=np.int32)
            last = self._draws.first + counts.clip(min=1) - 1
            result = replace(result, sampler_states=after[last].tobytes())
        return result

    def _draws_of(self, i: int) -> slice:
        first = self._draws.first[i]
        return slice(first, first + self._sizes[i])

    def _judge(self, drawn: IntArray) -> tuple[npt.NDArray[np.bool_], IntArray]:
        """bool[S'], which draws count (at least one for each row); and int[S], how many count."""
        if self._judged is None:
            counts = self._counts(drawn)
            is_right: npt.NDArray[np.bool_] = self._draws.within < counts[self._draws.row_of]
            for i, tree in self._trees.items():
                its = self._draws_of(i)
                right = tree.right_draws(drawn[its].tolist())
                is_right[its] = False
                is_right[its][right] = True
                counts[i] = len(right)
            self._judged = is_right, counts
        return self._judged

    def _counts(self, drawn: IntArray) -> IntArray:
        """How many tokens each sampling row returns if its guesses form a chain; 1 also where none could be sampled."""
        first = self._draws.first
        wrong = (drawn != self.guesses).nonzero()[0]  # a row's last draw is always wrong
        counts: IntArray = wrong[wrong.searchsorted(first)] - first + 1
        if drawn.min() < 0:  # a failed first draw ends its row; the next step reaches a later failed draw again
            counts -= (counts > 1) & (drawn[first + counts - 1] < 0)
        return counts


class Drafts:
    """Rows' next positions after steps with drafts. The scheduler learns them only from the steps' results."""

    def __init__(self, state: RowState, num_rows: int) -> None:
        self._guessing = Guessing(state)
        self._moves: Moves | None = None
        self._state = state
        self._next_position = np.zeros(num_rows, dtype=np.int64)
        self._stop_token_ids: dict[int, frozenset[int]] = {}  # by row
        self._has_stopped = np.zeros(num_rows, dtype=np.bool_)  # by row: its plans are in vain
        self._steps: list[DraftedStep] = []  # steps whose results may not be known yet

    def draft_with(self, drafter: Drafter, moves: Moves | None = None) -> None:
        """Use this drafter from now on. Without `moves`, each tree is reduced to its chain of first children."""
        self._guessing.drafter, self._guessing.takes_trees = drafter, moves is not None
        self._moves = moves

    def judge_by(self, parts: Sequence[RowPart]) -> None:
        """Let these parts judge the guesses for their rows; they override `RowPart.extend`."""
        self._guessing.judges = parts

    @property
    def is_busy(self) -> bool:
        """Whether the next plan must be told to `begin`."""
        return bool(self._steps) or bool(self._moves)

    def begin(self, plan: StepPlan) -> None:
        """Call this before a plan changes rows, and before their pages are read or reassigned.

        It moves what earlier results have found to be right. Rows that the plan takes from their sequences are not
        touched any more, because their pages may belong to other sequences from now on.
        """
        self._move()
        self._steps = [before for before in self._steps if not before.is_noted]
        if plan.new_rows or plan.freed_rows:
            left = np.array([new.row for new in plan.new_rows], dtype=np.int32)
            left = np.concatenate((left, np.frombuffer(plan.freed_rows, dtype=np.int32)))
            for before in self._steps:
                before.leave(left)

    def _note(self, step: DraftedStep) -> None:
        if step.is_noted or step.download is None:
            return
        step.note(self._state, self._next_position, self._moves)
        if self._stop_token_ids:
            self._has_stopped[step.stopped(self._stop_token_ids)] = True

    def _move(self) -> None:
        if self._moves and (moved := self._moves.apply()) is not None and self._guessing.drafter is not None:
            self._guessing.drafter.moved(*moved)

    def enter(self, new_rows: Sequence[NewRow]) -> None:
        """Reset the rows that new sequences enter."""
        rows = [new.row for new in new_rows]
        self._next_position[rows] = -1
        self._has_stopped[rows] = False
        self._stop_token_ids |= {new.row: frozenset(new.sampling.stop_token_ids) for new in new_rows}

    def end(self, plan: StepPlan) -> None:
        """Tell the drafter which rows a plan is about to free; blocks until their tokens are known."""
        if (drafter := self._guessing.drafter) is not None and plan.freed_rows:
            rows = np.frombuffer(plan.freed_rows, dtype=np.int32)
            for before in self._steps:
                if before.has_any(rows):
                    self._note(before)
            self._move()
            drafter.ended(rows, (1 + self._next_position[rows]).astype(np.int32))

    def expand(self, plan: StepPlan, batch: HostBatch) -> tuple[HostBatch, DraftedStep | None]:
        """Guess, and write the guesses to the token buffers; return the batch to compute, and how to judge its draws.

        This waits for earlier steps that draw for rows that need guesses, or rows whose start is only an upper bound.
        """
        num_rows, start = batch.rows.shape[0], batch.start
        most = np.frombuffer(plan.num_drafts, dtype=np.int32) if plan.num_drafts else np.zeros_like(start)
        is_bound = np.frombuffer(plan.start_bounds, dtype=np.bool_) if plan.start_bounds else most > 0
        if self._steps:
            waiting = batch.rows[is_bound | (most > 0)]
            for before in self._steps:
                if before.has_any(waiting):
                    self._note(before)
        self._move()
        if plan.start_bounds:
            start = np.where(is_bound, self._next_position[batch.rows], start).astype(np.int32)
        began = perf_counter_ns()
        useful = np.where(self._has_stopped[batch.rows], 0, most) if self._has_stopped.any() else most
        guesses = self._guessing.guess(batch.rows, start, useful.astype(np.int32, copy=False))
        num_draft_us = (perf_counter_ns() - began) // 1000
        num_new, sizes = batch.num_new - most, 1 + guesses.counts
        draws = spread(sizes)
        places = (start[draws.row_of] + draws.within).astype(np.int32)
        chosen, samples = batch.sample_idx, np.arange(places.shape[0])
        if are_some := chosen.shape[0] < num_rows:
            samples = np.isin(draws.row_of, chosen).nonzero()[0]
        expanded = HostBatch(batch.rows[draws.row_of], places, num_new[draws.row_of], samples)
        trees = {} if guesses.parents is None else trees_of(batch.rows, start, guesses)
        if trees:
            paths = path_table(places.shape[0], [(int(draws.first[i]) + 1, tree) for i, tree in trees.items()])
            expanded = expanded._replace(start=positions_of(places, paths), paths=paths, places=places)
            trees = {int(chosen.searchsorted(i)): tree for i, tree in trees.items()}
        if not chosen.shape[0]:
            return expanded, None
        rows, positions = batch.rows, start + num_new
        if are_some:
            rows, positions, sizes = rows[chosen], positions[chosen], sizes[chosen]
        step = DraftedStep(rows, positions, sizes, guesses.token_ids, trees, None if are_some else draws)
        step.num_draft_us, step.of = num_draft_us, self
        if self._state.has_logprobs:
            step.asking = (self._state.num_logprobs[expanded.rows[expanded.sample_idx]] >= 0).nonzero()[0]
        self._steps = [before for before in self._steps if not before.is_noted]
        self._steps.append(step)
        return expanded, step

    def drawn(self, step: DraftedStep, tokens: Download) -> None:
        """Take a step's tokens, which another stage has drawn."""
        step.download = tokens
        self._note(step)

    def finish(self, step: DraftedStep, result: StepResult, row_errors: tuple[RowError, ...]) -> StepResult:
        """Return the final result of a step that the device has computed."""
        self._note(step)
        return step.trimmed(result, row_errors)

    def clear(self) -> None:
        """Forget all rows."""
        self._steps.clear()
        if self._moves is not None:
            self._moves.clear()


def _chosen(column: bytes, rows: npt.NDArray[np.bool_]) -> bytes:
    """From a column with one part per row, return the parts of the chosen rows."""
    return np.frombuffer(column, dtype=np.int32).reshape(rows.shape[0], -1)[rows].tobytes() if column else column
