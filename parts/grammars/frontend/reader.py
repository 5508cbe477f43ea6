"""Parses grammars off the event loop, in processes that can be killed (`child_pool.py`), and caches them.

read ──▶ cached, even a refusal: answered at once
     └─▶ being parsed for another request: one question for all of them
     └─▶ a process, when it is the client's turn ──▶ cached
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from time import monotonic
from typing import Self

import structlog

from penstock.frontend.api.grammar_part import Grammar, GrammarPart
from penstock.frontend.api.service import Service
from penstock.frontend.errors import InvalidParameter, Overloaded, UnsupportedParameter
from penstock.frontend.parsing.parser import OutputFormat
from penstock.frontend.text.child_pool import ChildDiedError, ChildPool, ChildTooSlowError, ChildUnusableError
from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.frontend.validation.common import ValidRequest
from penstock.frontend.validation.grammar import GrammarSource
from penstock.models.finding.registry import model_path
from penstock.parts.grammars.frontend.output_grammar import bound
from penstock.parts.grammars.frontend.tags import as_calls
from penstock.parts.grammars.options import GrammarOptions

log = structlog.get_logger()

MAX_SECONDS = 2.0
"""Time limit for parsing one grammar. A typical one takes a few milliseconds."""

MAX_QUEUED = 64
MAX_CACHED = 1024
MAX_CACHED_BYTES = 16 << 20

GIVEN_UP_SECONDS = 60.0
"""How long a timeout is cached: if the machine was busy, the grammar may succeed later."""

_MAX_PROCESSES = 3
_MAX_ANSWER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Outcome:
    text: str = ""
    error: str = ""  # why it cannot be used
    num_bytes: int = 0  # of memory that the prepared grammar takes
    not_enforced: tuple[str, ...] = ()  # what it accepts although it should not, in words for the client
    is_given_up: bool = False  # parsing did not finish
    until: float = float("inf")  # when it leaves the cache (monotonic)

    @property
    def size(self) -> int:
        return len(self.text) + len(self.error) + sum(map(len, self.not_enforced))


class _Reading:
    """A question in progress, and how many requests wait for its answer."""

    def __init__(self, task: asyncio.Task[_Outcome]) -> None:
        self.task = task
        self.num_readers = 0


class GrammarReader(GrammarPart):
    """Parses and caches grammars for one model; lives in a running event loop until `close`."""

    def __init__(
        self,
        model: Path,
        max_seconds: float = MAX_SECONDS,
        *,
        open_objects: bool = False,
        tokenizer: TextTokenizer | None = None,
    ) -> None:
        """No process is started before the first grammar arrives.

        Args:
            model: the checkpoint's path.
            max_seconds: the time for one grammar.
            open_objects: whether objects may have properties that their schema does not list, if it says nothing of
                such properties.
            tokenizer: the model's, for structural tags.
        """
        self._tokenizer = tokenizer
        self._max_seconds = max_seconds
        self._cache: OrderedDict[bytes, _Outcome] = OrderedDict()
        self._cached_bytes = 0
        self._readings: dict[bytes, _Reading] = {}
        self._children = ChildPool(
            "penstock.parts.grammars.child.read",
            (str(model), *(["open-objects"] if open_objects else [])),
            max_processes=_MAX_PROCESSES,
            max_queued=MAX_QUEUED,
            max_answer_bytes=_MAX_ANSWER_BYTES,
        )

    @classmethod
    def of(cls, service: Service) -> Self:
        """The reader for the served model."""
        config = service.config
        open_objects = config.of(GrammarOptions).open_objects
        return cls(model_path(config), open_objects=open_objects, tokenizer=service.model.tokenizer)

    @property
    def process_ids(self) -> list[int]:
        """The idle processes."""
        return self._children.process_ids

    def bound(self, common: ValidRequest, output_format: OutputFormat, tokenizer: TextTokenizer) -> ValidRequest:
        return bound(common, output_format, tokenizer)

    async def read(self, source: GrammarSource, client: str = "") -> Grammar:
        if source.kind == "tags":
            assert self._tokenizer is not None
            source = as_calls(source, self._tokenizer)
        key = blake2b(f"{source.kind} {source.text}".encode(), digest_size=32).digest()
        outcome = self._cache.get(key)
        if outcome is None or outcome.until < monotonic():
            outcome = await self._read_once(key, source, client)
        else:
            self._cache.move_to_end(key)
        field = source.field
        if outcome.is_given_up:
            raise InvalidParameter(f"{field} cannot be used: {outcome.error}", param=field)
        if outcome.error:
            raise UnsupportedParameter(f"{field} cannot be used: {outcome.error}", param=field)
        not_enforced = outcome.not_enforced
        if source.is_strict and not_enforced:
            what = "; ".join(not_enforced)
            raise UnsupportedParameter(
                f"{field} is not supported with strict: {what}; without strict it is checked at the end", param=field
            )
        warnings = [*source.warnings, *(f"{field}: {what}" for what in not_enforced)]
        if not_enforced and source.schema:
            warnings.append(f"{field}: the finished text is checked, see schema_error")
        checked_schema = source.schema if not_enforced else ""
        return Grammar(outcome.text, outcome.num_bytes, checked_schema, tuple(warnings))

    async def mismatch(self, schema: str, text: str, client: str = "") -> str:
        try:
            [wrong] = await self._children.ask(["check", schema, text], self._max_seconds, client)
        except Overloaded:
            return "it was not checked: the server is busy"
        except (ChildTooSlowError, ChildDiedError, ChildUnusableError):
            log.warning("text not checked", num_chars=len(text))
            return "it could not be checked: that takes too much time or memory"
        return str(wrong)

    async def close(self) -> None:
        """End the processes."""
        await self._children.close()

    async def _read_once(self, key: bytes, source: GrammarSource, client: str) -> _Outcome:
        """The outcome of one question, shared by all requests that ask it; cancelled when none waits any more."""
        reading = self._readings.get(key)
        if reading is None:
            reading = self._readings[key] = _Reading(asyncio.create_task(self._ask(source, client)))
        reading.num_readers += 1
        try:
            outcome = await asyncio.shield(reading.task)
        finally:
            reading.num_readers -= 1
            if not reading.num_readers:
                if self._readings.get(key) is reading:
                    del self._readings[key]
                if not reading.task.done():
                    reading.task.cancel()
                    await asyncio.wait({reading.task})
        self._remember(key, outcome)
        return outcome

    async def _ask(self, source: GrammarSource, client: str) -> _Outcome:
        until = monotonic() + GIVEN_UP_SECONDS
        try:
            text, error, num_bytes, not_enforced = await self._children.ask(
                [source.kind, source.text], self._max_seconds, client
            )
        except ChildTooSlowError:
            log.warning("grammar timed out", kind=source.kind, seconds=self._max_seconds)
            error = f"parsing it takes longer than {self._max_seconds:g} seconds"
            return _Outcome(error=error, is_given_up=True, until=until)
        except ChildDiedError:
            log.warning("grammar process died", kind=source.kind)
            error = "it takes too much memory, or crashes the parser"
            return _Outcome(error=error, is_given_up=True, until=until)
        except ChildUnusableError as unusable:
            return _Outcome(error=str(unusable), until=0.0)
        return _Outcome(text, error, num_bytes, tuple(not_enforced))

    def _remember(self, key: bytes, outcome: _Outcome) -> None:
        old = self._cache.pop(key, None)
        if old is not None:
            self._cached_bytes -= len(key) + old.size
        self._cache[key] = outcome
        self._cached_bytes += len(key) + outcome.size
        while len(self._cache) > MAX_CACHED or self._cached_bytes > MAX_CACHED_BYTES:
            digest, old = self._cache.popitem(last=False)
            self._cached_bytes -= len(digest) + old.size
