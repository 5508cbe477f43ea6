"""Guesses for the rows of a step: the drafter's, cut and extended by the parts that judge them, such as grammars.

    forced by the grammar | guessed, cut where the grammar forbids | forced after the guesses

Where a grammar allows only one token, guessing that token cannot be wrong. In some texts, such as objects with fixed
keys, most tokens are forced in this way. This is jump-forward decoding (Zheng et al., "SGLang: Efficient Execution of
Structured Language Model Programs", 2024). Here the model still verifies forced tokens, so their keys, values and
log-probabilities are computed as usual.
"""

from collections.abc import Sequence as ListOf
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.gpu_worker.devices.device import IntArray
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.row_part import RowPart
from penstock.parts.drafts.worker.drafter import Drafter, Guesses, Int32Array
from penstock.parts.drafts.worker.trees import chain_parents, without_trees


class _Judged(NamedTuple):
    """The rows of a step whose guesses a part judges."""

    judge: RowPart
    is_its: npt.NDArray[np.bool_]  # [D]


class Guessing:
    """Asks the drafter for guesses, and lets the parts that judge them cut and extend them."""

    def __init__(self, state: RowState) -> None:
        self.drafter: Drafter | None = None
        self.takes_trees = False  # whether the model can compute trees
        self.judges: ListOf[RowPart] = ()  # at most one of them has a row
        self._state = state

    def guess(self, rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        """Guess the tokens of D rows, and put them into the token buffers. The arguments are those of `Drafter`."""
        drafter = self.drafter
        if drafter is None:
            return Guesses(np.zeros_like(most), most[:0])
        if judged := self._judged(rows):
            guesses = self._guess_judged(drafter, rows, positions, most, judged)
        else:
            guesses = self._ask(drafter, rows, positions, most, most > 0)
            if drafter.traits.writes_tokens and self._state.mirror is None:
                return guesses
        self._write(rows, positions, guesses)
        return guesses

    def _judged(self, rows: Int32Array) -> list[_Judged]:
        judging = [judge for judge in self.judges if judge.rows]
        found = [_Judged(judge, np.array([row in judge.rows for row in rows.tolist()])) for judge in judging]
        return [each for each in found if each.is_its.any()]

    def _guess_judged(
        self,
        drafter: Drafter,
        rows: Int32Array,
        positions: Int32Array,
        most: Int32Array,
        judged: ListOf[_Judged],
    ) -> Guesses:
        """`judged`: the rows that have a judge, by judge."""
        for judge, is_its in judged:
            if not judge.can_extend:
                most = np.where(is_its, 0, most)
        judged = [each for each in judged if each.judge.can_extend]
        if not judged:
            return self._ask(drafter, rows, positions, most, most > 0)
        texts: list[list[int]] = [[] for _ in rows]
        for judge, is_its in judged:
            self._extend(judge, (is_its & (most > 0)).nonzero()[0], rows, most, texts)
        forced = _guesses(texts)
        if forced.token_ids.shape[0]:
            self._write(rows, positions, forced)  # the drafter reads them
        asked = most > forced.counts
        if not drafter.traits.guesses_ahead:
            asked &= forced.counts == 0
        found = self._ask(drafter, rows, positions + forced.counts, most - forced.counts, asked)
        token_ids, ends = found.token_ids.tolist(), found.counts.cumsum().tolist()
        for text, count, end in zip(texts, found.counts.tolist(), ends, strict=True):
            text += token_ids[end - count : end]
        for judge, is_its in judged:
            self._extend(judge, (is_its & (found.counts > 0)).nonzero()[0], rows, most, texts)
        guesses = _guesses(texts)
        if found.parents is None:
            return guesses
        parents = [chain_parents(len(text)) for text in texts]
        is_free = ~np.any([is_its for _, is_its in judged], axis=0)
        for i in is_free.nonzero()[0].tolist():
            parents[i] = found.parents[ends[i] - len(texts[i]) : ends[i]]
        return guesses._replace(parents=np.concatenate(parents))

    def _ask(
        self,
        drafter: Drafter,
        rows: Int32Array,
        positions: Int32Array,
        most: Int32Array,
        asked: npt.NDArray[np.bool_],
    ) -> Guesses:
        """The drafter's guesses for the `asked` ones of D rows.

        They form a chain for rows that sample by their earlier tokens, because a row has only one set of these.
        """
        if asked.all():
            return self._in_chains(drafter.guess(rows, positions, most), rows)
        counts = np.zeros_like(most)
        if not asked.any():
            return Guesses(counts, counts[:0])
        guesses = self._in_chains(drafter.guess(rows[asked], positions[asked], most[asked]), rows[asked])
        counts[asked] = guesses.counts
        return guesses._replace(counts=counts)

    def _in_chains(self, guesses: Guesses, rows: Int32Array) -> Guesses:
        """The guesses, with chains in place of trees that cannot be computed."""
        if guesses.parents is not None:
            guesses = without_trees(guesses, [not self._takes_tree(row) for row in rows.tolist()])
        return guesses

    def _takes_tree(self, row: int) -> bool:
        is_judged = any(row in judge.rows for judge in self.judges)
        return self.takes_trees and not self._state.looks_back(row) and not is_judged

    def _extend(
        self, judge: RowPart, index: IntArray, rows: Int32Array, most: Int32Array, texts: list[list[int]]
    ) -> None:
        """Let a judge cut and extend the guessed texts of its rows, those at `index`."""
        if index.shape[0]:
            guessed = [texts[i] for i in index.tolist()]
            extended = judge.extend(rows[index], guessed, most[index])
            for i, text in zip(index.tolist(), extended, strict=True):
                texts[i] = text

    def _write(self, rows: Int32Array, positions: Int32Array, guesses: Guesses) -> None:
        counts, token_ids = guesses.counts, guesses.token_ids
        if not token_ids.shape[0]:
            return
        has_some = counts.nonzero()[0]
        first = positions[has_some] + 1
        self._state.write_tokens(rows[has_some], first, counts[has_some], token_ids.tobytes())
        if (mirror := self._state.mirror) is not None:
            index = np.repeat(np.arange(has_some.shape[0]), counts[has_some])
            within = np.arange(token_ids.shape[0]) - (counts.cumsum() - counts)[has_some][index]
            mirror[rows[has_some][index], first[index] + within] = token_ids


def _guesses(texts: ListOf[ListOf[int]]) -> Guesses:
    return Guesses(np.array([len(text) for text in texts], dtype=np.int32), np.array([*chain(*texts)], dtype=np.int32))
