"""Heads with layers of their own: EAGLE, and heads with the same inputs. They guess each token from the one before.

At position i a head gets the model's hidden state there and token i + 1, and guesses token i + 2. The head's output at
position i stands in for the model's hidden state at i + 1, which is not known yet. The head's keys and values of a
position are computed anew once the model has computed the position. They may be missing, if nothing was guessed for a
row for longer than hidden states are kept. Then the head attends to the positions that it has.
"""

import numpy as np
from torch import Tensor

from penstock.gpu_worker.devices.device import Device, IntArray
from penstock.gpu_worker.models.model import Model
from penstock.gpu_worker.models.native_decoder import NativeDecoderModel
from penstock.gpu_worker.state.row_state import RowState
from penstock.ipc.messages import StepPlan
from penstock.kernels.native.program.chain import Kept, Output
from penstock.parts.drafts.worker.drafter import Drafter, Guesses, Int32Array, Traits
from penstock.parts.drafts.worker.draws import draw
from penstock.parts.drafts.worker.heads.head_model import HeadModel, normed
from penstock.parts.drafts.worker.heads.hidden_states import HiddenStates
from penstock.parts.drafts.worker.heads.weights import HeadWeights
from penstock.parts.drafts.worker.pages import DraftPages

NUM_KEPT = 64
"""The last positions of a row whose hidden states are kept: guesses may pause for so long without a gap."""


class HeadDrafter(Drafter):
    """See `Drafter`."""

    def __init__(
        self,
        weights: HeadWeights,
        pages: DraftPages,
        state: RowState,
        model: Model,
        device: Device,
        kept: HiddenStates,
    ) -> None:
        self.traits = Traits(wants_hidden=True, num_taps=weights.num_taps, writes_tokens=True)
        num_rows, max_len = state.token_ids.shape
        self._weights = weights
        self._pages = pages
        self._state = state
        self._model = model
        self._device = device
        self._head = HeadModel(weights.layers, pages.kv, state, device, max_len - 1)
        self._kept = kept
        self._num_done = np.zeros(num_rows, dtype=np.int32)  # by row: the first position that may be missing
        output = self._native_output()
        native = None if output is None else self._head.chain(output, Kept(kept.states, kept.positions, self._num_done))
        self._native = native  # computes all guesses of a step in one call

    def apply(self, plan: StepPlan) -> None:
        """See `Drafter`."""
        if plan.copy_src:
            self._pages.apply(plan)
        for new in plan.new_rows:
            self._head.enter_row(new.row, new.num_prompt_tokens)
        if plan.new_rows:
            rows = np.array([new.row for new in plan.new_rows], dtype=np.int32)
            self._kept.forget(rows)
            self._num_done[rows] = 0

    def computed(self, rows: Int32Array, start: Int32Array, num_new: Int32Array, hidden: Tensor | None) -> None:
        """Keep each row's last hidden state; in longer chunks, compute the positions before the last one."""
        assert hidden is not None
        if self._weights.taps is not None:
            hidden = self._weights.taps(hidden)
        if hidden.shape[0] > rows.shape[0]:
            chunks, ends = np.flatnonzero(num_new > 1), num_new.cumsum()
            self._compute_chunks(rows[chunks], start[chunks], num_new[chunks], ends[chunks], hidden)
        keep_last = self._kept.keep_last if self._native is None else self._native.keep_last
        keep_last(rows, start, num_new, hidden)

    def _compute_chunks(
        self, rows: Int32Array, start: Int32Array, num_new: Int32Array, ends: Int32Array, hidden: Tensor
    ) -> None:
        """Compute the positions whose next token is in the chunk: the one before the chunk only if it was kept."""
        has_before = self._kept.has(rows, start - 1)
        first = (start - has_before).astype(np.int32)
        counts = (start + num_new - 1 - first).astype(np.int32)
        places = _runs(ends - counts - 1, counts)
        given = hidden.index_select(0, self._device.upload(np.maximum(places, 0).astype(np.int64)))
        if has_before.any():
            at = np.flatnonzero(has_before)
            given[self._device.upload((counts.cumsum() - counts)[at].astype(np.int64))] = self._kept.of(
                rows[at], first[at]
            ).to(given.dtype)
        self._head.compute(rows, first, counts, given)
        self._num_done[rows] = first + counts

    def guess(self, rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        """See `Drafter`."""
        sampler = self._state.native_sampler
        if self._native is not None and sampler is not None and not self._state.limits_tokens:
            return Guesses(*self._native.guess(sampler, rows, positions, most))
        last = positions - 1
        first = self._kept.first_kept(rows, np.minimum(self._num_done[rows], last), last)
        counts = np.where((first < positions) & (positions > 0), most, 0).astype(np.int32)
        asked = np.flatnonzero(counts)
        order = asked[np.argsort(-counts[asked], kind="stable")]  # rows with the most guesses first
        if not order.shape[0]:
            return Guesses(counts, counts[:0])
        tokens = np.zeros((rows.shape[0], int(counts[order[0]])), dtype=np.int32)
        tokens[order] = self._chain(rows[order], positions[order], (positions - first)[order], counts[order])
        self._num_done[rows[order]] = positions[order]
        return Guesses(counts, tokens[np.arange(tokens.shape[1]) < counts[:, None]])

    def _chain(self, rows: Int32Array, positions: Int32Array, num_new: Int32Array, most: Int32Array) -> Int32Array:
        """Guess token after token: int32[D, most[0]]; `most` is descending."""
        first, state = positions - num_new, self._state
        given = self._kept.of(np.repeat(rows, num_new), _runs(first, num_new))
        hidden = self._head.compute(rows, first, num_new, given)
        if hidden.shape[0] > rows.shape[0]:
            hidden = hidden.index_select(0, self._device.upload(num_new.cumsum() - 1))
        ones, downloads = np.ones_like(rows), []
        tokens = np.zeros((rows.shape[0], int(most[0])), dtype=np.int32)
        for step in range(1, tokens.shape[1] + 1):
            drawn = draw(self._logits(hidden), rows, positions + step, state, self._device)
            downloads.append(self._device.download(drawn))
            num_left = int(np.count_nonzero(most > step))
            rows, positions, most = rows[:num_left], positions[:num_left], most[:num_left]
            if num_left:
                hidden = self._head.compute(rows, positions + step - 1, ones[:num_left], hidden[:num_left])
        for step, download in enumerate(downloads):
            column = np.frombuffer(download.wait(), dtype=np.int32)
            tokens[: column.shape[0], step] = column
        return tokens

    def _native_output(self) -> Output | None:
        """The norm and output matrix after the head's layers, if native CPU kernels compute them."""
        matrix, model, token_map = self._weights.output, self._model, self._weights.token_map
        if matrix is None:
            program = model.output if isinstance(model, NativeDecoderModel) else None
        else:
            program = matrix.program
        if program is None:
            return None
        token_ids = None if token_map is None else token_map.token_ids
        return Output(program, self._weights.norm, token_ids, model.config.vocab_size)

    def _logits(self, hidden: Tensor) -> Tensor:
        hidden = normed(hidden, self._weights.norm)
        if self._weights.output is None:
            return self._model.logits(hidden)
        logits = self._weights.output(hidden)
        return logits if self._weights.token_map is None else self._weights.token_map(logits)

    def clear(self) -> None:
        """Forget all rows."""
        self._kept.forget(slice(None))
        self._num_done[:] = 0


def _runs(first: IntArray, counts: IntArray) -> Int32Array:
    """int32[sum of counts], the runs first[i], first[i] + 1, ... of counts[i] numbers, one after the other."""
    ends = counts.cumsum()
    return (np.repeat(first - ends + counts, counts) + np.arange(ends[-1])).astype(np.int32)
