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
from msgspec.structs import replace
from torch import Tensor

from penstock.gpu_worker.devices.device import Device, Download, Int32Array, IntArray
from penstock.gpu_worker.models.model import has_logits
from penstock.gpu_worker.part import Context
from penstock.gpu_worker.steps.row_part import RowPart, Sent
from penstock.ipc.messages import NewRow, RowError, StepPlan, StepResult
from penstock.kernels.sampling.token_masks import mask_tokens
from penstock.models.files.source import Checkpoint
from penstock.parts.grammars.messages import DropGrammar, GrammarPrepared, PrepareGrammar
from penstock.parts.grammars.worker.row import DrawnTokens, GrammarRow, Words
from penstock.parts.grammars.worker.store import GrammarStore

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


class Grammars(RowPart):
    """The grammars that are prepared, and those of all rows that have one."""

    orders = (PrepareGrammar, DropGrammar)

    def __init__(
        self,
        checkpoint: Checkpoint,
        vocab_size: int,
        device: Device,
        make_store: Callable[[Checkpoint], GrammarStore] = GrammarStore,
    ) -> None:
        """The checkpoint's tokenizer is read when the first grammar arrives."""
        self.store = make_store(checkpoint)
        self.can_extend = True  # while this process follows the rows' grammars
        self._counts_forced = False
        self._num_forced: list[int] = []
        self._num_draws = 0  # of the step being launched
        self._vocab_size = vocab_size
        self._device = device
        self.rows: dict[int, GrammarRow] = {}
        self._filler: _Filler | None = None
        self._asked: list[_Asked] = []  # for the step being launched

    @classmethod
    def of(cls, context: Context) -> "Grammars":
        config, make = context.model.config, cls
        if not has_logits(config):
            from penstock.parts.grammars.worker.elsewhere import GrammarsElsewhere  # most models are in one stage

            make = GrammarsElsewhere
        grammars = make(context.checkpoint, config.vocab_size, context.device)
        grammars.can_extend &= context.hello.num_stages == 1  # all stages must make the same guesses
        return grammars

    def order(self, message: PrepareGrammar | DropGrammar) -> None:
        if isinstance(message, PrepareGrammar):
            self.store.prepare(message)
        else:
            self.store.drop(message.grammar_id)

    def take_done(self) -> list[GrammarPrepared]:
        return self.store.take_prepared() if self.store.is_busy else []

    @property
    def is_busy(self) -> bool:
        return self.store.is_busy

    def clear(self) -> None:
        """Forget all rows' grammars, and all prepared ones."""
        self.rows.clear()
        self.store.clear()

    def enter(self, plan: StepPlan) -> None:
        if self.rows and plan.freed_rows:
            for row in np.frombuffer(plan.freed_rows, dtype=np.int32).tolist():
                self.rows.pop(row, None)
        for new in plan.new_rows:
            if new.grammar_id:
                self._enter(new)
            elif self.rows:
                self.rows.pop(new.row, None)

    def expect_guesses(self) -> None:
        """Count from now on how many tokens are forced after a row's last one, so that a plan makes room for them."""
        self._counts_forced = self.can_extend

    def extend(self, rows: IntArray, guesses: ListOf[ListOf[int]], most: IntArray) -> list[list[int]]:
        assert self._filler is not None
        following = [self.rows[row] for row in rows.tolist()]
        return self._filler.extend(list(zip(following, guesses, most.tolist(), strict=True)), self._vocab_size)

    def begin_draws(self, rows: Int32Array, guesses: IntArray | None) -> None:
        """Start filling the masks of the step."""
        self._num_draws = rows.shape[0]
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
            self._filler.fill(self._asked, self._vocab_size, counts_forced=self._counts_forced)

    def mask(self, logits: Tensor) -> tuple[RowError, ...]:
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

    def sends(self) -> Sent | None:
        """At a row's first draw, the number of tokens that are forced after its last draw; nothing if none are."""
        num_forced, self._num_forced = self._num_forced, []
        if not any(num_forced):
            return None
        counts = np.zeros(self._num_draws, dtype=np.int32)
        counts[[first for first, _, _ in self._asked]] = num_forced
        return Sent(partial(_with_forced, counts.tobytes()))

    def drawn(self, download: Download) -> None:
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


def _with_forced(num_forced: bytes, result: StepResult, _sent: bytes) -> StepResult:
    return replace(result, num_forced=num_forced)


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
