"""Work that may never end is done in processes that can be killed: grammars, chat templates, long texts.

    ask ──▶ one of `max_processes` processes, started when needed, one question each at a time
              │ answers in time          the answer; the process waits for the next question
              │ takes too long           killed; this question alone fails
              ▼ dies                     this question alone fails

A thread cannot be ended, and neither can code in C; a process can, and the kernel bounds its memory.
One JSON line in is answered with one line out; a first line, [], says that the process is ready, and
a first line ["", reason] that it never will be.
"""

import asyncio
import os
import resource
import sys
from contextlib import suppress
from typing import Any

import msgspec
import structlog

from penstock.frontend.errors import Overloaded

log = structlog.get_logger()

MAX_START_SECONDS = 60.0
"""For a process to read the tokenizer: about a second, more on a machine that is busy starting."""

_LEFT_SECONDS = 0.1
"""A question whose client has left may still be answered for so long: starting another process costs more."""

MAX_MEMORY = 4 << 30
"""Bytes of address space of a process: most vocabularies and grammars need a tenth of it."""


class ChildTooSlowError(Exception):
    """The question took longer than it may; its process is gone."""


class ChildDiedError(Exception):
    """The process died over the question."""


class ChildUnusableError(Exception):
    """Processes of this kind do not start; the message says why."""


class ChildPool:
    """Processes of one module, for one model; lives in a running event loop until `close`."""

    def __init__(
        self, module: str, arguments: tuple[str, ...], *, max_processes: int, max_queued: int, max_answer_bytes: int
    ) -> None:
        """No process is started before the first question. It gets `arguments` and the id of this process."""
        self._command = [sys.executable, *(["-O"] if sys.flags.optimize else []), "-m", module, *arguments]
        self._max_queued = max_queued
        self._max_answer_bytes = max_answer_bytes
        self._idle: list[_Child] = []
        self._slots = asyncio.Semaphore(max_processes)
        self._num_queued = 0

    @property
    def process_ids(self) -> list[int]:
        """The processes that wait for work."""
        return [child.pid for child in self._idle]

    async def warm(self) -> None:
        """Start the first process before the first question. Failures show when somebody asks."""
        async with self._slots:
            if not self._idle:
                with suppress(ChildUnusableError):
                    child = await self._start()
                    self._idle.append(child)

    async def ask(self, question: list[Any], seconds: float) -> list[Any]:
        """The answer to a question.

        Raises:
            ChildTooSlowError, ChildDiedError, ChildUnusableError: there is none.
            Overloaded: too many wait already.
        """
        if self._num_queued >= self._max_queued:
            raise Overloaded(f"{self._max_queued} requests wait to be read", retry_after=1)
        self._num_queued += 1
        try:
            async with self._slots:
                return await self._ask_a_child(question, seconds)
        finally:
            self._num_queued -= 1

    async def close(self) -> None:
        """End the processes that wait; another question would start new ones."""
        for child in self._idle:
            await child.end()
        self._idle.clear()

    async def _ask_a_child(self, question: list[Any], seconds: float) -> list[Any]:
        self._idle = [child for child in self._idle if child.is_alive]
        child = self._idle.pop() if self._idle else await self._start()
        asking = asyncio.create_task(child.ask(question))
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(asking)
        except TimeoutError:
            raise ChildTooSlowError from None
        except (EOFError, OSError, ValueError, msgspec.MsgspecError):
            raise ChildDiedError from None
        finally:  # also when the client leaves meanwhile
            await asyncio.shield(self._release(child, asking))

    async def _release(self, child: "_Child", asking: asyncio.Task[list[Any]]) -> None:
        if not asking.done():
            await asyncio.wait({asking}, timeout=_LEFT_SECONDS)
        if asking.done() and not asking.cancelled() and asking.exception() is None:
            self._idle.append(child)
            return
        asking.cancel()
        await asyncio.wait({asking})
        await child.end()

    async def _start(self) -> "_Child":
        process = await asyncio.create_subprocess_exec(
            *self._command,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=self._max_answer_bytes,
            env=os.environ | {"RAYON_NUM_THREADS": "1"},  # the libraries' threads
        )
        child = _Child(process)
        is_ready = False
        try:
            async with asyncio.timeout(MAX_START_SECONDS):
                answer = await child.line()
            is_ready = not answer
        except (TimeoutError, EOFError):
            answer = ["", "the process for it does not start"]
        finally:
            if not is_ready:
                await asyncio.shield(child.end())
        if not is_ready:
            raise ChildUnusableError(answer[1])
        return child


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

    async def line(self) -> list[Any]:
        """Its next answer.

        Raises:
            EOFError: if it died.
        """
        if self._process.stdout is None:
            raise EOFError
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return msgspec.json.decode(line, type=list[Any])

    async def ask(self, question: list[Any]) -> list[Any]:
        """Its answer to a question."""
        if self._process.stdin is None:
            raise EOFError
        self._process.stdin.write(msgspec.json.encode(question) + b"\n")
        return await self.line()

    async def end(self) -> None:
        """Kill it, and wait until it and its pipes are gone."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if self._process.stdin is not None and self._process.stdout is not None:
            self._process.stdin.close()
            with suppress(OSError):
                await self._process.stdin.wait_closed()
            while await self._process.stdout.read(1 << 16):
                pass


# --- in the process ---------------------------------------------------------------------------


def limit_resources() -> None:
    """From here on: bounded memory, no file grows, no core dump, few descriptors."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))


def answer(line: list[Any]) -> None:
    """Write one line for the parent."""
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()
