"""Grammars on stages of a pipeline that draw no tokens (all but the last one): they only note which rows have one."""

from penstock.gpu_worker.devices.device import Device
from penstock.ipc.messages import NewRow
from penstock.models.files.source import Checkpoint
from penstock.parts.grammars.messages import GrammarPrepared, PrepareGrammar
from penstock.parts.grammars.worker.masks import Grammars
from penstock.parts.grammars.worker.row import GrammarRow
from penstock.parts.grammars.worker.store import GrammarStore


class StoreElsewhere(GrammarStore):
    """Reports every grammar as ready at once: the last stage prepares grammars, and reports their errors."""

    def prepare(self, message: PrepareGrammar) -> None:
        self._is_busy = True
        self._prepared.append(GrammarPrepared(message.grammar_id))


class GrammarsElsewhere(Grammars):
    """Only notes its rows: the stage that draws their tokens follows their grammars."""

    def __init__(self, checkpoint: Checkpoint, vocab_size: int, device: Device) -> None:
        super().__init__(checkpoint, vocab_size, device, StoreElsewhere)
        self.can_extend = False

    def _enter(self, new: NewRow) -> None:
        self.rows[new.row] = GrammarRow(None, new.sampling, [])
