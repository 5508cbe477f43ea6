"""The rows that follow grammars: masks are filled by a thread while the device computes the step's logits.

    launch k     forward pass is queued    | thread: waits for token k-1, advances the matchers, fills the masks
                 masks are taken, uploaded | <----
                 sampling is queued        |

Only the launch of the sampling waits for the thread, never the device for the host as long as a forward pass
takes longer than a mask. A step without such rows does nothing here.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import structlog
from llguidance import LLTokenizer
from torch import Tensor

from penstock.core.config import ConfigError
from penstock.core.config.grammar import grammar_vocabulary
from penstock.gpu_worker.device import Device, Download, IntArray
from penstock.gpu_worker.grammar_row import DrawnToken, GrammarRow, Words
from penstock.ipc.messages import NewRow, RowError, StepPlan
from penstock.kernels.token_masks import mask_tokens

log = structlog.get_logger()


class _Masks(NamedTuple):
    """For C constrained rows of a step."""

    indices: list[int]  # among the step's sampling rows
    words: Words  # int32[C, W]
    errors: tuple[RowError, ...]


class Grammars:
    """The grammar of every row that has one; empty and free of cost as long as none has."""

    def __init__(self, folder: Path, vocab_size: int, device: Device) -> None:
        """`folder` is the checkpoint's; its tokenizer is read when the first grammar comes."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, GrammarRow] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._reader: _Reader | None = None
        self._asked: list[tuple[int, GrammarRow]] = []  # of the step being launched: sampling index, row
        self._masks: Future[_Masks] | None = None

    def clear(self) -> None:
        """No row follows a grammar."""
        self._rows.clear()

    def apply(self, plan: StepPlan) -> None:
        """Take in freed and new rows."""
        if self._rows and plan.freed_rows:
            for row in np.frombuffer(plan.freed_rows, dtype=np.int32).tolist():
                self._rows.pop(row, None)
        for new in plan.new_rows:
            if new.sampling.grammar:
                self._enter(new)
            elif self._rows:
                self._rows.pop(new.row, None)

    def begin(self, rows: IntArray) -> None:
        """Start to fill the masks of a step; to be called before its forward pass.

        Args:
            rows: int[S], the rows that sample.
        """
        if not self._rows:
            return
        self._asked = [(i, self._rows[row]) for i, row in enumerate(rows.tolist()) if row in self._rows]
        if self._asked:
            assert self._thread is not None
            self._masks = self._thread.submit(_fill, self._asked, self._vocab_size)

    def mask(self, logits: Tensor) -> tuple[RowError, ...]:
        """Apply the masks to the step's logits [S, V], in place; the rows without a next token."""
        if self._masks is None:
            return ()
        masks = self._masks.result()
        self._masks = None
        upload = self._device.upload
        mask_tokens(logits, upload(np.array(masks.indices, dtype=np.int64)), upload(masks.words))
        return masks.errors

    def expect(self, download: Download) -> None:
        """The step's tokens, in the order of the sampling rows, are the first int32s of this."""
        for i, row in self._asked:
            row.expect(DrawnToken(download, i))
        self._asked = []

    def _enter(self, new: NewRow) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            self._reader = _Reader(self._folder)
        assert self._reader is not None
        outputs = np.frombuffer(new.token_ids, dtype=np.int32)[new.num_prompt_tokens :].tolist()
        row = GrammarRow(new.sampling, outputs)
        self._rows[new.row] = row
        self._thread.submit(self._reader.prepare, row)  # before any mask of it: the thread keeps the order


class _Reader:
    """Reads grammars over the checkpoint's tokens, in the thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._vocabulary: LLTokenizer | None = None

    def prepare(self, row: GrammarRow) -> None:
        """Make a row ready; what goes wrong is that row's error alone."""
        try:
            if self._vocabulary is None:
                self._vocabulary = grammar_vocabulary(self._folder)
            row.prepare(self._vocabulary)
        except ConfigError as error:
            row.fail(str(error))
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
    return _Masks([i for i, _ in asked], words, tuple(errors))
