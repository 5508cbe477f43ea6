"""Grammars are read off the event loop, in processes that can be killed (`child_pool.py`), and remembered."""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog

from penstock.frontend.child_pool import ChildDiedError, ChildPool, ChildTooSlowError, ChildUnusableError
from penstock.frontend.errors import InvalidParameter, UnsupportedParameter

log = structlog.get_logger()

GrammarKind = Literal["json", "regex", "choice", "grammar", "calls"]

MAX_SECONDS = 2.0
"""For reading one grammar. Usual ones take a few milliseconds."""

MAX_QUEUED = 64
MAX_CACHED = 1024
MAX_CACHED_BYTES = 16 << 20

_MAX_PROCESSES = 2
_MAX_ANSWER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as the client wrote it, small enough to be read."""

    kind: GrammarKind
    text: str
    field: str  # of the request: named in errors


@dataclass(frozen=True, slots=True)
class _Outcome:
    grammar: str
    error: str

    @property
    def num_bytes(self) -> int:
        return len(self.grammar) + len(self.error)


class GrammarReader:
    """Reads and remembers grammars for one model; lives in a running event loop until `close`."""

    def __init__(self, folder: Path, max_seconds: float = MAX_SECONDS) -> None:
        """`folder` is the checkpoint's. No process is started before the first grammar comes."""
        self._max_seconds = max_seconds
        self._cache: OrderedDict[tuple[str, str], _Outcome] = OrderedDict()
        self._cached_bytes = 0
        self._children = ChildPool(
            "penstock.frontend.grammar_child",
            (str(folder),),
            max_processes=_MAX_PROCESSES,
            max_queued=MAX_QUEUED,
            max_answer_bytes=_MAX_ANSWER_BYTES,
        )

    @property
    def process_ids(self) -> list[int]:
        """The processes that wait for work."""
        return self._children.process_ids

    async def read(self, source: GrammarSource) -> str:
        """The grammar as the worker takes it.

        Raises:
            UnsupportedParameter: if the grammar, or this model with one, is not supported.
            InvalidParameter: if it takes too much time or memory.
            Overloaded: if too many wait already.
        """
        key = (source.kind, source.text)
        outcome = self._cache.get(key)
        if outcome is None:
            outcome = await self._read(source)
            self._remember(key, outcome)
        else:
            self._cache.move_to_end(key)
        if outcome.error:
            raise UnsupportedParameter(f"{source.field} cannot be used: {outcome.error}", param=source.field)
        return outcome.grammar

    async def close(self) -> None:
        """End the processes."""
        await self._children.close()

    async def _read(self, source: GrammarSource) -> _Outcome:
        field = source.field
        try:
            grammar, error = await self._children.ask([source.kind, source.text], self._max_seconds)
        except ChildTooSlowError:
            log.warning("grammar given up", kind=source.kind, seconds=self._max_seconds)
            raise InvalidParameter(
                f"{field} cannot be used: reading it takes longer than {self._max_seconds:g} seconds", param=field
            ) from None
        except ChildDiedError:
            log.warning("grammar process died", kind=source.kind)
            raise InvalidParameter(
                f"{field} cannot be used: it takes too much memory, or cannot be read at all", param=field
            ) from None
        except ChildUnusableError as unusable:
            raise UnsupportedParameter(f"{field} cannot be used: {unusable}", param=field) from None
        return _Outcome(grammar, error)

    def _remember(self, key: tuple[str, str], outcome: _Outcome) -> None:
        if key in self._cache:  # two asked for it at once
            return
        self._cache[key] = outcome
        self._cached_bytes += len(key[1]) + outcome.num_bytes
        while len(self._cache) > MAX_CACHED or self._cached_bytes > MAX_CACHED_BYTES:
            (_, text), old = self._cache.popitem(last=False)
            self._cached_bytes -= len(text) + old.num_bytes
