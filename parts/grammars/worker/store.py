"""Grammars, prepared while steps run: each grammar text once, in a thread of the store, and copied for every row.

    PrepareGrammar ──▶ known: ready at once
                   └─▶ new: the thread builds it; ready when its answer is taken

llguidance releases the GIL while it works, so a grammar that takes a second does not delay steps.

Copies share one automaton, which grows with use, up to a limit. When it is full, rows that need more states continue
with a copy of a new automaton (`Prototype.renew`). A grammar that is not in use any more is kept for a while.
"""

import os
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

import structlog
from llguidance import LLMatcher, LLTokenizer

from penstock.config import ConfigError
from penstock.ipc import faults
from penstock.models.files.source import Checkpoint
from penstock.models.grammar_tokens import grammar_vocabulary, make_matcher
from penstock.parts.grammars.messages import GrammarPrepared, PrepareGrammar

log = structlog.get_logger()

MAX_IDLE = 256
MAX_IDLE_BYTES = 256 << 20
"""Limit for grammars that are kept but not in use."""

MAX_COPIES = 512
"""How many rows use one automaton, one after the other, before the next request gets a new one."""

MAX_RENEWAL_SECONDS = 0.05
"""A grammar that takes longer to build is not rebuilt in the middle of a step."""

_PRIORITY = 10  # as `nice`: steps come first


class Prototype:
    """A grammar at the start of a text. Once it is built, only the thread that fills masks uses it."""

    def __init__(self, vocabulary: LLTokenizer, text: str, num_bytes: int) -> None:
        self.vocabulary = vocabulary
        self.num_bytes = num_bytes
        self.num_copies = 0
        self._text = text
        began = time.perf_counter()
        self._matcher = make_matcher(vocabulary, text)
        self._seconds = time.perf_counter() - began
        self._generation = 0

    @property
    def error(self) -> str:
        """What is wrong with the grammar; empty if it can be used."""
        if not self._matcher.is_error():
            return ""
        return f"the grammar cannot be used: {self._matcher.get_error()[:200]}"

    def copy(self) -> tuple[LLMatcher, int]:
        """Return a matcher for a row, and the generation of its automaton."""
        self.num_copies += 1
        return self._matcher.deep_copy(), self._generation

    def renew(self, generation: int) -> bool:
        """Make a new automaton for later copies, because this generation's is full. False if it would take too long."""
        if generation == self._generation:
            if self._seconds > MAX_RENEWAL_SECONDS:
                return False
            self._matcher = make_matcher(self.vocabulary, self._text)
            self._generation += 1
        return True


class _Made(NamedTuple):
    """The thread's answer."""

    epoch: int
    grammar_id: int
    text: str
    prototype: Prototype | None
    error: str


class GrammarStore:
    """All methods except the building run in the worker's main thread."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """The checkpoint's tokenizer is read when the first grammar arrives."""
        self._checkpoint = checkpoint
        self._vocabulary: LLTokenizer | None = None
        self._live: dict[int, str] = {}  # texts by id
        self._wanted: set[int] = set()  # ids of the grammars that are being prepared and were not dropped meanwhile
        self._known: OrderedDict[str, Prototype] = OrderedDict()  # least recently requested first
        self._work: SimpleQueue[tuple[int, PrepareGrammar]] = SimpleQueue()
        self._made: SimpleQueue[_Made] = SimpleQueue()
        self._prepared: list[GrammarPrepared] = []
        self._num_pending = 0
        self._thread: threading.Thread | None = None
        self._epoch = 0
        self._before = faults.point("worker.grammar")
        self._is_busy = False

    @property
    def is_busy(self) -> bool:
        """Whether there are answers to take, now or soon."""
        return self._is_busy

    @property
    def num_known(self) -> int:
        """How many grammars are in memory, in use or kept."""
        return len(self._known)

    def clear(self) -> None:
        """Forget all grammars in use, and do not answer earlier requests."""
        self._epoch += 1
        self._live.clear()
        self._wanted.clear()
        self._prepared.clear()
        self._is_busy = self._num_pending > 0
        self._forget_idle()

    def prepare(self, message: PrepareGrammar) -> None:
        """Start preparing a grammar."""
        self._is_busy = True
        text = message.grammar
        known = self._known.get(text)
        if known is not None and known.num_copies < MAX_COPIES:
            self._known.move_to_end(text)
            self._live[message.grammar_id] = text
            self._prepared.append(GrammarPrepared(message.grammar_id))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        self._num_pending += 1
        self._wanted.add(message.grammar_id)
        self._work.put((self._epoch, message))

    def drop(self, grammar_id: int) -> None:
        """Note that no row will use this grammar any more, even if it is still being prepared."""
        self._live.pop(grammar_id, None)
        self._wanted.discard(grammar_id)
        self._forget_idle()

    def take_prepared(self, *, wait: bool = False) -> list[GrammarPrepared]:
        """Return answers that became ready since the last call; with `wait`, wait until all requests are answered."""
        while self._num_pending:
            try:
                made = self._made.get(block=wait)
            except Empty:
                break
            self._num_pending -= 1
            if made.prototype is not None:
                self._known[made.text] = made.prototype
                self._known.move_to_end(made.text)
            if made.epoch == self._epoch:
                if made.prototype is not None and made.grammar_id in self._wanted:
                    self._live[made.grammar_id] = made.text
                self._wanted.discard(made.grammar_id)
                self._prepared.append(GrammarPrepared(made.grammar_id, made.error))
            self._forget_idle()
        prepared, self._prepared = self._prepared, []
        self._is_busy = self._num_pending > 0
        return prepared

    def get(self, grammar_id: int) -> Prototype | None:
        """Return a prepared grammar; None if there is none with this id."""
        text = self._live.get(grammar_id)
        return None if text is None else self._known[text]

    def _forget_idle(self) -> None:
        in_use = set(self._live.values())
        idle = [text for text in self._known if text not in in_use]
        num_bytes = sum(self._known[text].num_bytes for text in idle)
        for num_left, text in zip(range(len(idle), 0, -1), idle, strict=True):
            if num_left <= MAX_IDLE and num_bytes <= MAX_IDLE_BYTES:
                return
            num_bytes -= self._known.pop(text).num_bytes

    # --- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(OSError):  # not every system has priorities per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PRIORITY)
        while True:
            epoch, message = self._work.get()
            # Requests that left before their turn must not hold up the grammars of others.
            is_wanted = epoch == self._epoch and message.grammar_id in self._wanted
            prototype, error = self._make(message) if is_wanted else (None, "")
            self._made.put(_Made(epoch, message.grammar_id, message.grammar, prototype, error))

    def _make(self, message: PrepareGrammar) -> tuple[Prototype | None, str]:
        try:
            if self._vocabulary is None:
                self._vocabulary = grammar_vocabulary(self._checkpoint)
            self._before()
            prototype = Prototype(self._vocabulary, message.grammar, message.num_bytes)
        except ConfigError as error:
            return None, str(error)
        except Exception as error:
            log.exception("grammar failed")
            return None, f"the grammar failed: {type(error).__name__}"
        return (None, prototype.error) if prototype.error else (prototype, "")
