"""Grammars are read off the event loop, in a process that can be killed, and remembered.

request ──▶ cache ──(miss)──▶ one of `_MAX_PROCESSES` processes (grammar_child.py), started when needed
                                │ answers in time          the grammar, or what is wrong with it: kept
                                │ takes too long           killed, the request alone is refused
                                ▼ dies                     the request alone is refused
"""

import asyncio
import os
import sys
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from penstock.frontend.errors import InvalidParameter, Overloaded, UnsupportedParameter

log = structlog.get_logger()

GrammarKind = Literal["json", "regex", "choice", "grammar", "calls"]

MAX_SECONDS = 2.0
"""For reading one grammar. Usual ones take a few milliseconds."""

MAX_START_SECONDS = 60.0
"""For a process to read the tokenizer: about a second, more on a machine that is busy starting."""

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


class _Child:
    """One running process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def line(self) -> list[str]:
        """Its next answer.

        Raises:
            EOFError: if it died.
        """
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return msgspec.json.decode(line, type=list[str])

    async def ask(self, source: GrammarSource) -> _Outcome:
        """Let it read a grammar."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode([source.kind, source.text]) + b"\n")
        grammar, error = await self.line()
        return _Outcome(grammar, error)

    async def end(self) -> None:
        """Kill it, and wait until it is gone."""
        with suppress(ProcessLookupError):
            self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()


class GrammarReader:
    """Reads and remembers grammars for one model; lives in a running event loop until `close`."""

    def __init__(self, folder: Path, max_seconds: float = MAX_SECONDS) -> None:
        """`folder` is the checkpoint's. No process is started before the first grammar comes."""
        self._folder = folder
        self._max_seconds = max_seconds
        self._cache: OrderedDict[tuple[str, str], _Outcome] = OrderedDict()
        self._cached_bytes = 0
        self._idle: list[_Child] = []
        self._slots = asyncio.Semaphore(_MAX_PROCESSES)
        self._num_queued = 0

    @property
    def process_ids(self) -> list[int]:
        """The processes that wait for work."""
        return [child.pid for child in self._idle]

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
        for child in self._idle:
            await child.end()
        self._idle.clear()

    async def _read(self, source: GrammarSource) -> _Outcome:
        if self._num_queued >= MAX_QUEUED:
            raise Overloaded(f"{MAX_QUEUED} grammars wait to be read", retry_after=1)
        self._num_queued += 1
        try:
            async with self._slots:
                return await self._read_in_process(source)
        finally:
            self._num_queued -= 1

    async def _read_in_process(self, source: GrammarSource) -> _Outcome:
        self._idle = [child for child in self._idle if child.is_alive]
        child = self._idle.pop() if self._idle else await self._start(source)
        is_fine = False
        try:
            async with asyncio.timeout(self._max_seconds):
                outcome = await child.ask(source)
            is_fine = True
            return outcome
        except TimeoutError:
            log.warning("grammar given up", kind=source.kind, seconds=self._max_seconds)
            raise InvalidParameter(
                f"{source.field} cannot be used: reading it takes longer than {self._max_seconds:g} seconds",
                param=source.field,
            ) from None
        except (EOFError, OSError, ValueError, msgspec.MsgspecError):
            log.warning("grammar process died", kind=source.kind)
            raise InvalidParameter(
                f"{source.field} cannot be used: it takes too much memory, or cannot be read at all", param=source.field
            ) from None
        finally:  # also when the client leaves meanwhile
            if is_fine:
                self._idle.append(child)
            else:
                await asyncio.shield(child.end())

    async def _start(self, source: GrammarSource) -> _Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock.frontend.grammar_child",
            str(self._folder),
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_ANSWER_BYTES,
            env=os.environ | {"RAYON_NUM_THREADS": "1"},  # the library's threads
        )
        child = _Child(process)
        is_ready = False
        try:
            async with asyncio.timeout(MAX_START_SECONDS):
                answer = await child.line()
            is_ready = not answer
        except (TimeoutError, EOFError):
            answer = ["", "the process that reads grammars does not start"]
        finally:
            if not is_ready:
                await asyncio.shield(child.end())
        if not is_ready:
            raise UnsupportedParameter(f"{source.field} cannot be used: {answer[1]}", param=source.field)
        return child

    def _remember(self, key: tuple[str, str], outcome: _Outcome) -> None:
        if key in self._cache:  # two asked for it at once
            return
        self._cache[key] = outcome
        self._cached_bytes += len(key[1]) + outcome.num_bytes
        while len(self._cache) > MAX_CACHED or self._cached_bytes > MAX_CACHED_BYTES:
            (_, text), old = self._cache.popitem(last=False)
            self._cached_bytes -= len(text) + old.num_bytes
