"""Grammars on a stage of a pipeline before the last one, which draws no tokens: it only knows which rows have one."""

from penstock.core.checkpoint.source import Checkpoint
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.grammars.masks import Grammars
from penstock.gpu_worker.grammars.row import GrammarRow
from penstock.gpu_worker.grammars.store import GrammarStore
from penstock.ipc.messages import GrammarPrepared, NewRow, PrepareGrammar


class StoreElsewhere(GrammarStore):
    """Every grammar is ready at once: the last stage prepares them, and says what is wrong with them."""

    def prepare(self, message: PrepareGrammar) -> None:
        self.is_preparing = True
        self._prepared.append(GrammarPrepared(message.grammar_id))


class GrammarsElsewhere(Grammars):
    """Rows follow their grammars where their tokens are drawn."""

    def __init__(self, checkpoint: Checkpoint, vocab_size: int, device: Device) -> None:
        super().__init__(checkpoint, vocab_size, device, StoreElsewhere)
        self.can_extend = False

    def _enter(self, new: NewRow) -> None:
        self.rows[new.row] = GrammarRow(None, new.sampling, [])
