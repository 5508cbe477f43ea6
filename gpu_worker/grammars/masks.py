"""Rows with grammars: a thread fills their masks while the device computes the step's logits.

    launch k     forward pass is queued    | thread: waits for token k-1, advances the matchers, fills the masks
                 masks are taken, uploaded | <----
                 sampling is queued        |

Only the launch of the sampling waits for the thread. The device does not wait for the host as long as a forward pass
takes longer than a mask. A step without such rows does nothing here. Grammars are prepared while steps run, before a
row may use them (`store.py`).

With drafts, the tokens of such a row are known before a step is launched. The thread first determines which guesses the
grammar allows, and which tokens it forces. Then each position gets a mask of its own.
"""

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from penstock.gpu_worker.devices.device import Device, Download, IntArray
from penstock.gpu_worker.grammars.row import DrawnTokens, GrammarRow, Words
from penstock.gpu_worker.grammars.store import GrammarStore
from penstock.ipc.messages import NewRow, RowError, StepPlan
from penstock.kernels.sampling.token_masks import mask_tokens
from penstock.models.files.source import Checkpoint

log = structlog.get_logger()


class _Asked(NamedTuple):
    """A row for which a step needs masks."""

    first: int  # index into the step's draws
    row: GrammarRow
    guesses: list[int]  # one more draw follows for each


class _Masks(NamedTuple):
    """For C draws of a step."""

    indices: IntArray  # int64[C], indices into the step's draws
    words: Words  # int32[C, W]
    errors: tuple[RowError, ...]
    num_forced: list[int]  # for each requested row: tokens that are forced after its last draw


class Grammars:
    """The grammars of all rows that have one; it costs nothing if there are none."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        vocab_size: int,
        device: Device,
        make_store: Callable[[Checkpoint], GrammarStore] = GrammarStore,
    ) -> None:
        """The checkpoint's tokenizer is read when the first grammar arrives."""
        self.store = make_store(checkpoint)
        self.can_extend = True
        """Whether this process follows the rows' grammars, so that it can judge and extend guesses."""
        self.counts_forced = False
        """Whether forced tokens are counted for `take_forced`."""
        self._num_forced: list[int] = []
        self._vocab_size = vocab_size
        self._device = device
        self.rows: dict[int, GrammarRow] = {}
        """Usually empty; then a step has nothing to do here."""
        self._filler: _Filler | None = None
        self._asked: list[_Asked] = []  # for the step being launched

    def clear(self) -> None:
        """Forget all rows' grammars, and all prepared ones."""
        self.rows.clear()
        self.store.clear()

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's freed and new rows."""
        if self.rows and plan.freed_rows:
            for row in np.frombuffer(plan.freed_rows, dtype=np.int32).tolist():
                self.rows.pop(row, None)
        for new in plan.new_rows:
            if new.grammar_id:
                self._enter(new)
            elif self.rows:
                self.rows.pop(new.row, None)

    def has(self, row: int) -> bool:
        """Whether a row follows a grammar."""
        return row in self.rows

    def extend(self, rows: IntArray, guesses: ListOf[ListOf[int]], most: IntArray) -> list[list[int]]:
        """Cut guesses for rows' next tokens where the grammars forbid them, and append the tokens that are forced next.

        Args:
            rows: int[D], rows with grammars. All tokens of launched steps are known.
            guesses: the guesses for each row.
            most: int[D], the most tokens to return for each row.
        """
        assert self._filler is not None
        following = [self.rows[row] for row in rows.tolist()]
        return self._filler.extend(list(zip(following, guesses, most.tolist(), strict=True)), self._vocab_size)

    def begin(self, rows: IntArray, guesses: IntArray | None = None) -> None:
        """Start filling the masks of a step; call this before its forward pass.

        Args:
            rows: int[S], the rows that sample, each once or, with drafts, once for each token that it may return.
            guesses: int[S], the guess that follows each; negative after a row's last one.
        """
        draws = enumerate(rows.tolist())
        if guesses is None:
            self._asked = [_Asked(i, self.rows[row], []) for i, row in draws if row in self.rows]
        else:
            self._asked = []
            last = -1
            for (i, row), guess in zip(draws, guesses.tolist(), strict=True):
                if row in self.rows:
                    if row != last:
                        self._asked.append(_Asked(i, self.rows[row], []))
                    if guess >= 0:
                        self._asked[-1].guesses.append(guess)
                last = row
        if self._asked:
            assert self._filler is not None
            self._filler.fill(self._asked, self._vocab_size, counts_forced=self.counts_forced)

    def mask(self, logits: Tensor) -> tuple[RowError, ...]:
        """Apply the masks to the step's logits [S, V] in place; return the rows that have no possible token."""
        if not self._asked:
            return ()
        assert self._filler is not None
        masks = self._filler.masks()
        self._num_forced = masks.num_forced
        library = self._device.library
        if library is not None and logits.dtype == torch.float32:
            library.mask_tokens(logits, masks.indices, masks.words)
        else:
            mask_tokens(logits, self._device.upload(masks.indices), self._device.upload(masks.words))
        return masks.errors

    def take_forced(self, num_draws: int) -> bytes:
        """int32[S], for the step with the masks that were applied last; empty if no tokens are forced.

        At a row's first draw it has the number of tokens that are forced after the row's last draw, else 0. Call it
        before `expect`.
        """
        forced = b""
        if any(self._num_forced):
            counts = np.zeros(num_draws, dtype=np.int32)
            counts[[first for first, _, _ in self._asked]] = self._num_forced
            forced = counts.tobytes()
        self._num_forced = []
        return forced

    def expect(self, download: Download) -> None:
        """Tell the rows that this download begins with the step's tokens, int32, in the order of the draws."""
        for first, row, guesses in self._asked:
            row.expect(DrawnTokens(download, first, guesses))
        self._asked = []

    def _enter(self, new: NewRow) -> None:
        if self._filler is None:
            self._filler = _Filler()
        outputs = np.frombuffer(new.token_ids, dtype=np.int32)[new.num_prompt_tokens :].tolist()
        row = GrammarRow(self.store.get(new.grammar_id), new.sampling, outputs)
        self.rows[new.row] = row
        self._filler.prepare(row)


_Guessed = tuple[GrammarRow, ListOf[int], int]
"""A row, guesses for its next tokens, and the most tokens that there may be."""


class _Filler:
    """Fills masks one after the other, in its own thread.

    It uses two queues instead of an executor, because an executor's locks would cost the step's thread as much time as
    the masks cost this thread.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._filled: SimpleQueue[_Masks] = SimpleQueue()
        self._extended: SimpleQueue[list[list[int]]] = SimpleQueue()
        Thread(target=self._run, name="grammar", daemon=True).start()

    def prepare(self, row: GrammarRow) -> None:
        """Prepare a row before its first mask; if this fails, only that row has an error."""
        self._work.put(partial(_prepare, row))

    def extend(self, guessed: list[_Guessed], vocab_size: int) -> list[list[int]]:
        """Cut and extend guesses; see `Grammars.extend`."""
        self._work.put(lambda: self._extended.put([_extend(each, vocab_size) for each in guessed]))
        return self._extended.get()

    def fill(self, asked: list[_Asked], vocab_size: int, *, counts_forced: bool) -> None:
        """Start filling the masks of these rows; each call must be followed by a call of `masks`."""
        self._work.put(lambda: self._filled.put(_fill(asked, vocab_size, counts_forced=counts_forced)))

    def masks(self) -> _Masks:
        """Wait for the masks."""
        return self._filled.get()

    def _run(self) -> None:
        while True:
            self._work.get()()


def _prepare(row: GrammarRow) -> None:
    try:
        row.prepare()
    except Exception as error:
        log.exception("grammar failed")
        row.fail(f"the grammar failed: {type(error).__name__}")


def _extend(guessed: _Guessed, vocab_size: int) -> list[int]:
    row, guesses, most = guessed
    try:
        return row.extend(guesses, most, vocab_size)
    except Exception as error:
        log.exception("grammar failed")
        row.fail(f"the grammar failed: {type(error).__name__}")
        return []


def _fill(asked: list[_Asked], vocab_size: int, *, counts_forced: bool) -> _Masks:
    indices = [i for first, _, guesses in asked for i in range(first, first + 1 + len(guesses))]
    words = np.empty((len(indices), -(-vocab_size // 32)), dtype=np.int32)
    errors = []
    begin = 0
    for first, row, guesses in asked:
        row_words = words[begin : begin + 1 + len(guesses)]
        begin += row_words.shape[0]
        try:
            error = row.fill(row_words, vocab_size, guesses, counts_forced=counts_forced)
        except Exception as failure:
            log.exception("grammar failed")
            error = f"the grammar failed: {type(failure).__name__}"
            row.fail(error)
            row_words[:] = -1
        if error:
            errors.append(RowError(first, error))
    return _Masks(np.array(indices), words, tuple(errors), [row.num_forced for _, row, _ in asked])
