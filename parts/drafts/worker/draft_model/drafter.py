"""A draft model: a smaller model with the same vocabulary computes the sequences as well, and so guesses tokens.

It draws as the model does, with the same noise for the same position and seed, and the row's own temperature and
filters. So both draw the same token where their distributions are alike, and no rejection sampling is needed.
Source: Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant speculative decoding" (2025).

It keeps its keys and values in pages of its own, numbered as the model's pages, and computes the same chunks of
prompts. It can fall behind, because a prompt was found in a cache, or because nothing was guessed for a while. Then it
catches up by a bounded number of tokens a step, and guesses nothing for rows that are still behind.
Pages that several rows share may be written again. This does not change them, since they hold the same tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.gpu_worker.devices.device import Device, Graphs, IntArray
from penstock.gpu_worker.state.row_state import RowState
from penstock.ipc.messages import StepPlan
from penstock.models.description.model_config import PromptClasses
from penstock.parts.drafts.worker.draft_model.passes import DraftPasses
from penstock.parts.drafts.worker.draft_model.validity import Validity
from penstock.parts.drafts.worker.drafter import Drafter, Guesses, Int32Array, Int64Array, Traits
from penstock.parts.drafts.worker.draws import draw
from penstock.parts.drafts.worker.pages import DraftPages

_CATCH_UP = 256
"""Tokens that a step may compute to catch up: they cost a few times what a decode costs the model itself."""

_UNASKED = 64
"""After so many plans without guesses, prompts are not computed: guesses do not pay now, or there are no decodes."""


class Bounds(NamedTuple):
    """Limits of a draft model."""

    max_drafts: int  # guesses for a row in a step
    max_len: int  # positions that it can compute
    max_tokens: int  # in a pass
    vocab_size: int  # of the draft model
    model_vocab_size: int  # of the model for which it guesses


class DraftModel(Drafter):
    """See the module."""

    traits = Traits(guesses_ahead=True)

    def __init__(
        self,
        passes: DraftPasses,
        pages: DraftPages,
        state: RowState,
        device: Device,
        bounds: Bounds,
        classes: PromptClasses | None = None,
    ) -> None:
        """`classes`: prompt lengths for which the draft model's positions are encoded differently."""
        self._passes = passes
        self._state = state
        self._device = device
        self._bounds = bounds
        self._pages = pages
        self._kv = Validity(state, pages.kv.num_pages, pages.kv.page_size, bounds.max_drafts, classes)
        self._is_left_out = np.zeros(state.token_ids.shape[0], dtype=np.bool_)  # rows that want no guesses
        self._num_unasked = 0  # consecutive plans that sample but allow no guesses

    def clear(self) -> None:
        self._kv.clear()
        self._num_unasked = 0

    def capture(self, graphs: Graphs) -> None:
        self._passes.capture(graphs)

    def warm_up(self, contexts: Sequence[int]) -> None:
        """See `Drafter`. Decodes of one and of two tokens, and prompts; all on the page that page tables begin with."""
        row = np.zeros(1, dtype=np.int32)
        for end in sorted({min(context, self._bounds.max_len) for context in contexts}):
            for num_new in sorted({min(count, end, self._bounds.max_tokens) for count in (1, 2, _CATCH_UP)}):
                self._pass(row, row + (end - num_new), row + num_new)

    def apply(self, plan: StepPlan) -> None:
        if plan.copy_src:
            self._kv.copied(*(pages.tolist() for pages in self._pages.apply(plan)))
        for new in plan.new_rows:
            self._is_left_out[new.row] = new.sampling.max_drafts == 0
            self._passes.enter_row(new.row, new.num_prompt_tokens)
        self._kv.apply(plan)
        if plan.num_drafts and any(plan.num_drafts):
            self._num_unasked = 0
        elif any(plan.samples):
            self._num_unasked += 1

    def computed(self, rows: Int32Array, start: Int32Array, num_new: Int32Array, hidden: Tensor | None) -> None:
        """Compute the same chunks of prompts."""
        if self._num_unasked > _UNASKED:
            return
        chosen = (start < self._kv.num_known[rows]) & ~self._is_left_out[rows]
        if not chosen.any():
            return
        rows, start, num_new = rows[chosen], start[chosen], num_new[chosen]
        ends = np.minimum(start + num_new, self._bounds.max_len)
        valid = self._kv.valid(rows, ends)
        self._catch_up(rows, valid, ends, num_new)

    def guess(self, rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        """See `Drafter`."""
        valid = self._kv.valid(rows, positions)
        most = np.minimum(np.minimum(most, self._bounds.max_drafts), self._bounds.max_len - positions).clip(min=0)
        most[~self._are_known(rows, valid, positions)] = 0
        behind = (most > 0) & (positions - valid > 1)
        if behind.any():
            at = np.flatnonzero(behind)
            valid[at] = self._catch_up(rows[at], valid[at], positions[at].astype(np.int64), np.zeros_like(rows[at]))
            most[positions - valid > 1] = 0
        tokens = self._draw(rows, positions, valid, most)
        counts = np.logical_and.accumulate(tokens >= 0, axis=1).sum(axis=1).astype(np.int32)
        return Guesses(counts, tokens[np.arange(tokens.shape[1]) < counts[:, None]])

    def _draw(self, rows: Int32Array, positions: Int32Array, valid: Int64Array, most: Int32Array) -> Int32Array:
        """int32[D, k]: up to `most` tokens for each row; negative where there is none."""
        tokens = np.full((rows.shape[0], max(1, int(most.max(initial=0)))), -1, dtype=np.int32)
        drawn: list[Tensor] = []
        asked: list[Int64Array] = []
        for i in range(int(most.max(initial=0))):
            at: Int64Array = np.flatnonzero(most > i)
            start = (positions[at] + i if i else valid[at]).astype(np.int32)
            drawn.append(self._pass(rows[at], start, positions[at] + np.int32(i + 1) - start))
            asked.append(at)
        if not drawn:
            return tokens
        values = np.frombuffer(self._device.download(torch.cat(drawn)).wait(), dtype=np.int32)
        ends = np.cumsum([at.shape[0] for at in asked])
        for i, (at, end) in enumerate(zip(asked, ends.tolist(), strict=True)):
            tokens[at, i] = values[end - at.shape[0] : end]
        first = asked[0]
        self._kv.computed(rows[first], positions[first].astype(np.int64) + 1)
        if tokens.shape[1] > 1:
            was_input = np.arange(1, tokens.shape[1]) < most[first, None]  # the last guess was not an input
            self._kv.computed_guesses(rows[first], np.where(was_input, tokens[first, :-1], -1))
        return tokens

    def _pass(self, rows: Int32Array, start: Int32Array, num_new: Int32Array) -> Tensor:
        """Compute rows, and draw the token after each: int32[N], on the device."""
        logits = self._passes.compute(rows, start, num_new, np.arange(rows.shape[0]))
        if logits.shape[1] > self._bounds.model_vocab_size:  # beyond the vocabulary
            logits = logits[:, : self._bounds.model_vocab_size].contiguous()
        return draw(logits, rows, start + num_new, self._state, self._device)

    def _catch_up(self, rows: Int32Array, valid: Int64Array, ends: Int64Array, own: Int32Array) -> Int64Array:
        """Compute what is missing up to `ends`: `own` tokens of each row, and `_CATCH_UP` more of all rows together.

        Returns:
            int64[D], how many positions of each row are valid now.
        """
        left, room = _CATCH_UP, self._bounds.max_tokens
        num_new = np.zeros_like(rows)
        for i, (missing, free) in enumerate(zip((ends - valid).tolist(), own.tolist(), strict=True)):
            num_new[i] = count = max(0, min(missing, free + left, room))
            left -= max(0, count - free)
            room -= count
        num_new[~self._are_known(rows, valid, valid + num_new - 1)] = 0
        at = np.flatnonzero(num_new)
        if at.shape[0]:
            self._passes.compute(rows[at], valid[at].astype(np.int32), num_new[at], at[:0])
            valid = valid + num_new
            self._kv.computed(rows[at], valid[at])
        return valid

    def _are_known(self, rows: Int32Array, first: IntArray, last: IntArray) -> npt.NDArray[np.bool_]:
        """bool[D]: whether the draft model knows all tokens of positions `first` to `last`."""
        if self._bounds.vocab_size >= self._bounds.model_vocab_size:
            return np.ones(rows.shape[0], dtype=np.bool_)
        spans = zip(rows.tolist(), first.tolist(), last.tolist(), strict=True)
        found = [
            int(self._state.host_tokens(row)[begin : end + 1].max(initial=0)) < self._bounds.vocab_size
            for row, begin, end in spans
        ]
        return np.array(found, dtype=np.bool_)
