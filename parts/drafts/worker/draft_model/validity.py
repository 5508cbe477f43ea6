"""How far a drafter's own keys and values are valid, for rows and for pages.

A drafter's pages are numbered as the model's, so page tables serve both. But only the model's pages are moved between
tiers and engines, and a step may be computed without the drafter. So a full page is named by its content: a digest of
all tokens up to its end. Wherever a row's page comes from, its keys and values are valid if and only if its name is the
digest of the row's own tokens. All ranks come to the same result.

    positions   0 ...... valid ......... position
                [ valid )[ to catch up ][ guesses that were inputs )
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from penstock.gpu_worker.state.row_state import RowState
from penstock.ipc.messages import NewRow, StepPlan
from penstock.models.description.model_config import PromptClasses
from penstock.parts.drafts.worker.drafter import Int32Array

_NOTHING = b""
"""The name of a page that is not full of valid content."""


class Validity:
    """The valid part of a drafter's keys and values, for R rows and all pages."""

    def __init__(
        self, state: RowState, num_pages: int, page_size: int, most: int, classes: PromptClasses | None = None
    ) -> None:
        """`most`: the most guesses for a row in a step. `classes`: those of the drafter's model."""
        num_rows = state.token_ids.shape[0]
        self._state = state
        self._page_size = page_size
        self._classes = classes
        self.num_known = np.zeros(num_rows, dtype=np.int64)
        """int64[R], the number of tokens with which each row entered."""
        self._valid = np.zeros(num_rows, dtype=np.int64)
        self._inputs = np.full((num_rows, most), -1, dtype=np.int32)  # guesses computed after the valid positions
        self._names = [_NOTHING] * num_pages
        self._pages: list[list[int]] = [[] for _ in range(num_rows)]
        self._digests = [_NOTHING] * num_rows  # of the tokens in the row's first `_num_digested` pages
        self._num_digested = np.zeros(num_rows, dtype=np.int64)

    def clear(self) -> None:
        """Forget all rows and pages."""
        self._names[:] = [_NOTHING] * len(self._names)
        self.num_known[:] = 0
        self._valid[:] = 0

    def copied(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Note that pages have been copied, one after the other."""
        for source, target in zip(src, dst, strict=True):
            self._names[target] = self._names[source]

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's new rows and pages."""
        for new in plan.new_rows:
            self._enter(new)
        if plan.page_rows:
            pages = iter(np.frombuffer(plan.page_ids, dtype=np.int32).tolist())
            rows, counts = (np.frombuffer(each, dtype=np.int32).tolist() for each in (plan.page_rows, plan.page_counts))
            for row, count in zip(rows, counts, strict=True):
                for _ in range(count):
                    self._pages[row].append(page := next(pages))
                    self._names[page] = _NOTHING

    def _enter(self, new: NewRow) -> None:
        row, size = new.row, 4 * self._page_size
        pages = self._pages[row] = np.frombuffer(new.page_ids, dtype=np.int32).tolist()
        digest, num_valid = self._seed(new.num_prompt_tokens), 0
        for page in pages[: len(new.token_ids) // size]:
            end = _digest(digest, new.token_ids[num_valid * size : (num_valid + 1) * size])
            if self._names[page] != end:
                break
            digest, num_valid = end, num_valid + 1
        for page in pages[num_valid:]:
            self._names[page] = _NOTHING
        self._digests[row], self._num_digested[row] = digest, num_valid
        self._valid[row] = num_valid * self._page_size
        self._inputs[row] = -1
        self.num_known[row] = len(new.token_ids) // 4

    def _seed(self, num_prompt_tokens: int) -> bytes:
        """The key of the first digest of a row."""
        classes = self._classes
        if classes is None or num_prompt_tokens <= classes.up_to:
            return b"\0"
        return num_prompt_tokens.to_bytes(8) if classes.each_length else b"\1"

    def valid(self, rows: Int32Array, positions: Int32Array) -> npt.NDArray[np.int64]:
        """Return how many positions of each row are valid, all of them below `positions`.

        Args:
            rows: int32[D].
            positions: int32[D], of each row's last token; the host knows the tokens up to there.
        """
        inputs = self._inputs[rows]
        valid: npt.NDArray[np.int64] = self._valid[rows]
        places = valid[:, None] + np.arange(inputs.shape[1])
        is_right = places < positions[:, None]
        tokens = self._state.host_table()
        is_right &= tokens[rows[:, None], np.minimum(places, tokens.shape[1] - 1)] == inputs
        valid += np.logical_and.accumulate(is_right, axis=1).sum(axis=1)
        np.minimum(valid, positions, out=valid)
        self._inputs[rows] = -1
        self._advance(rows, valid)
        return valid

    def computed(self, rows: Int32Array, ends: npt.NDArray[np.int64]) -> None:
        """All positions of these rows (int32[D]) up to `ends` (int64[D]) are valid now; the host knows their tokens."""
        self._advance(rows, ends)

    def computed_guesses(self, rows: Int32Array, guesses: Int32Array) -> None:
        """These tokens were inputs after the valid positions: int32[D, at most `most`], -1 where there is none."""
        self._inputs[rows] = -1
        self._inputs[rows, : guesses.shape[1]] = guesses

    def _advance(self, rows: Int32Array, valid: npt.NDArray[np.int64]) -> None:
        self._valid[rows] = valid
        size = self._page_size
        full = valid // size
        for i in np.flatnonzero(full > self._num_digested[rows]).tolist():
            row, tokens = int(rows[i]), self._state.host_tokens(rows[i])
            digest = self._digests[row]
            for place in range(int(self._num_digested[row]), int(full[i])):
                digest = _digest(digest, tokens[place * size : (place + 1) * size].tobytes())
                self._names[self._pages[row][place]] = digest
            self._digests[row], self._num_digested[row] = digest, full[i]


def _digest(before: bytes, tokens: bytes) -> bytes:
    return blake2b(tokens, digest_size=16, key=before).digest()
