"""Rows with grammars: a thread fills their masks while the device computes the step's logits.

    launch k     forward pass is queued    | thread: waits for token k-1, advances the matchers, fills the masks
                 masks are taken, uploaded | <----
                 sampling is queued        |

Only the launch of the sampling waits for the thread; the device does not wait for the host as long as a forward pass
takes longer than a mask. A step without such rows does nothing here. Grammars are prepared beside the steps, before a
row may use them (`store.py`).
"""

from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from penstock.core.checkpoint.source import Checkpoint
from penstock.gpu_worker.devices.device import Device, Download, IntArray
from penstock.gpu_worker.grammars.row import DrawnToken, GrammarRow, Words
from penstock.gpu_worker.grammars.store import GrammarStore
from penstock.ipc.messages import NewRow, RowError, StepPlan
from penstock.kernels.token_masks import mask_tokens

log = structlog.get_logger()


class _Masks(NamedTuple):
    """For C constrained rows of a step."""

    indices: IntArray  # int64[C], indices into the step's sampling rows
    words: Words  # int32[C, W]
    errors: tuple[RowError, ...]


class Grammars:
    """The grammars of all rows that have one; without any, it costs nothing."""

    def __init__(self, checkpoint: Checkpoint, vocab_size: int, device: Device) -> None:
        """The checkpoint's tokenizer is read when the first grammar arrives."""
        self.store = GrammarStore(checkpoint)
        self._vocab_size = vocab_size
        self._device = device
        self.rows: dict[int, GrammarRow] = {}
        """Usually empty: then a step has nothing to begin, to mask or to expect."""
        self._filler: _Filler | None = None
        self._asked: list[tuple[int, GrammarRow]] = []  # for the step being launched: sampling index, row

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

    def begin(self, rows: IntArray) -> None:
        """Start filling the masks of a step; call this before its forward pass.

        Args:
            rows: int[S], the rows that sample.
        """
        self._asked = [(i, self.rows[row]) for i, row in enumerate(rows.tolist()) if row in self.rows]
        if self._asked:
            assert self._filler is not None
            self._filler.fill(self._asked, self._vocab_size)

    def mask(self, logits: Tensor) -> tuple[RowError, ...]:
        """Apply the masks to the step's logits [S, V] in place; return the rows that have no possible token."""
        if not self._asked:
            return ()
        assert self._filler is not None
        masks = self._filler.masks()
        library = self._device.library
        if library is not None and logits.dtype == torch.float32:
            library.mask_tokens(logits, masks.indices, masks.words)
        else:
            mask_tokens(logits, self._device.upload(masks.indices), self._device.upload(masks.words))
        return masks.errors

    def expect(self, download: Download) -> None:
        """Tell the rows that this download starts with the step's tokens, int32, in the order of the sampling rows."""
        for i, row in self._asked:
            row.expect(DrawnToken(download, i))
        self._asked = []

    def _enter(self, new: NewRow) -> None:
        if self._filler is None:
            self._filler = _Filler()
        outputs = np.frombuffer(new.token_ids, dtype=np.int32)[new.num_prompt_tokens :].tolist()
        row = GrammarRow(self.store.get(new.grammar_id), new.sampling, outputs)
        self.rows[new.row] = row
        self._filler.prepare(row)


class _Filler:
    """Fills masks in its own thread, one after the other.

    It uses two queues and not an executor, whose locks would cost the step's thread as much as the masks cost this one.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._filled: SimpleQueue[_Masks] = SimpleQueue()
        Thread(target=self._run, name="grammar", daemon=True).start()

    def prepare(self, row: GrammarRow) -> None:
        """Prepare a row before its first mask; a failure is that row's error only."""
        self._work.put(partial(_prepare, row))

    def fill(self, asked: list[tuple[int, GrammarRow]], vocab_size: int) -> None:
        """Start filling the masks of these rows; each call is followed by one of `masks`."""
        self._work.put(partial(self._fill, asked, vocab_size))

    def masks(self) -> _Masks:
        """Wait for the masks."""
        return self._filled.get()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def _fill(self, asked: list[tuple[int, GrammarRow]], vocab_size: int) -> None:
        self._filled.put(_fill(asked, vocab_size))


def _prepare(row: GrammarRow) -> None:
    try:
        row.prepare()
    except Exception as error:
        log.exception("grammar failed")
        row.fail(f"the grammar failed: {type(error).__name__}")


def _fill(asked: list[tuple[int, GrammarRow]], vocab_size: int) -> _Masks:
    words = np.empty((len(asked), -(-vocab_size // 32)), dtype=np.int32)
    errors = []
    for (i, row), row_words in zip(asked, words, strict=True):
        try:
            error = row.fill(row_words, vocab_size)
        except Exception as failure:
            log.exception("grammar failed")
            error = f"the grammar failed: {type(failure).__name__}"
            row.fail(error)
            row_words[:] = -1
        if error:
            errors.append(RowError(i, error))
    return _Masks(np.array([i for i, _ in asked]), words, tuple(errors))
