"""Runs work that may never end in processes that can be killed: grammars, chat templates, long texts.

    ask ──▶ its client's turn (`fair_slots.py`)
              ▼
            one of `max_processes` processes, started when needed, one question each at a time
              │ answers in time          the answer; the process waits for the next question
              │ computes for too long    killed; this question alone fails
              │ waits for too long       killed; status 503, because the machine is busy
              ▼ dies                     this question alone fails, if a second process dies of it too

A process may also be killed or stopped from outside, which is not the question's fault. The question is then asked once
more, in a process that is started for it. If that fails too without a fault of the question, the answer is status 503.

The turn in which a process was killed ends only when its successor is ready: the client that had it pays for that, and
the others find as many processes as before. Long questions leave a process to short ones, and start their own.

A thread cannot be ended from outside, and neither can code in C. A process can, and the kernel limits its memory. A
process that has answered many questions, or has grown, is replaced; its successor is started first.

Each JSON line in is answered with one line out. Before that, a first line [] says that the process is ready, and a
first line ["", reason] that it never will be.
"""

import asyncio
import os
import resource
import sys
from collections.abc import Coroutine
from contextlib import suppress
from time import monotonic
from typing import Any

import msgspec
import structlog

from penstock.frontend.errors import Unavailable
from penstock.frontend.text.fair_slots import Cost, FairSlots, Slot

log = structlog.get_logger()

MAX_START_SECONDS = 60.0
"""Time for a process to read the tokenizer: about a second, more on a machine that is busy starting."""

_LEFT_SECONDS = 0.1
"""How long a question whose client has left may still be answered: starting another process costs more."""

MAX_QUESTIONS = 20_000
MAX_GROWTH = 256 << 20
"""After so many questions, or when it is larger by so many bytes than when it was ready, a process is replaced."""

RETRY_SECONDS = 5
"""When clients may ask again if no process is available now."""

_OWN_SHARE = 0.05
"""A process that computed for a smaller share of its time was held up from outside: stopped, or on a busy machine."""

_PATIENCE = 8
"""A question may take so many times its CPU seconds by the clock: beside others it computes slowly."""

_MIN_WAIT = 0.02
_BUSY = "reading this request timed out: the server is overloaded"

MAX_MEMORY = 4 << 30
"""Limit for the address space of a process, in bytes: most vocabularies and grammars need a tenth of it."""


class ChildTooSlowError(Exception):
    """The question took too long; its process was killed."""


class ChildDiedError(Exception):
    """Two processes died over the question, one after the other."""


class ChildUnusableError(Exception):
    """Processes of this kind cannot do their work; the message says why."""


class _ChildHeldUpError(Exception):
    """A process had no answer in time, but has hardly computed either."""


class _ChildNotStartedError(Exception):
    """A process could not be started now; the message says why."""


class ChildPool:
    """Processes of one module, for one model; lives in a running event loop until `close`."""

    def __init__(
        self,
        module: str,
        arguments: tuple[str, ...],
        *,
        max_processes: int,
        max_queued: int,
        max_answer_bytes: int,
        max_short: int = 0,
    ) -> None:
        """No process is started before the first question. Processes get `arguments` and the id of this process.

        Questions of at most `max_short` bytes are known to take little time, and longer ones may take much; with 0
        their size says nothing.
        """
        self._kind = module.removeprefix("penstock.")
        self._command = [sys.executable, *(["-O"] if sys.flags.optimize else []), "-m", module, *arguments]
        self._max_answer_bytes = max_answer_bytes
        self._max_short = max_short
        self._idle: list[_Child] = []
        self._running: set[_Child] = set()  # processes that start, work or wait
        self._max_processes = max_processes
        self._slots = FairSlots(max_processes, max_queued, "to be read")
        self._num_lost = 0  # processes that were killed or died over questions, and have no successor yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._renewal: asyncio.Task[None] | None = None

    @property
    def process_ids(self) -> list[int]:
        """The processes that wait for work."""
        return [child.pid for child in self._idle]

    async def warm(self) -> str:
        """Start a process before the first question; return the error, or "". Questions would report the error too."""
        async with self._slots.slot("", "short"):
            if not self._idle:
                try:
                    child = await self._start()
                except (ChildUnusableError, _ChildNotStartedError) as error:
                    return str(error)
                self._idle.append(child)
        return ""

    async def ask(self, question: list[Any], seconds: float, client: str = "") -> list[Any]:
        """The answer to a question that may take so many seconds of CPU time. The time is charged to `client`.

        Raises:
            ChildTooSlowError, ChildDiedError, ChildUnusableError: there is no answer.
            Overloaded: too many questions wait already.
            Unavailable: no process could answer now, for reasons other than the question.
        """
        line = msgspec.json.encode(question) + b"\n"
        cost: Cost = "unknown"
        if self._max_short:
            cost = "short" if len(line) <= self._max_short else "long"
        slot = await self._slots.enter(client, cost)
        try:
            return await self._ask_up_to_twice(line, seconds, cost)
        finally:
            if self._num_lost > 0 and not self._is_closed:
                self._num_lost -= 1
                self._do(self._replace(slot))
            else:
                slot.leave()

    async def _ask_up_to_twice(self, line: bytes, seconds: float, cost: Cost) -> list[Any]:
        try:
            try:
                # Even the first long question leaves a process to short ones.
                is_own = cost == "long" and len(self._running) < self._max_processes
                return await self._ask(
                    (None if is_own else await self._waiting()) or await self._start(), line, seconds
                )
            except (ChildDiedError, _ChildHeldUpError) as error:
                log.warning("helper process lost, retrying", kind=self._kind, reason=type(error).__name__)
                self._num_lost = max(0, self._num_lost - 1)
                return await self._ask(await self._start(), line, seconds)
        except _ChildHeldUpError:
            raise Unavailable(_BUSY, retry_after=RETRY_SECONDS) from None
        except _ChildNotStartedError as error:
            log.error("helper process not started", kind=self._kind, reason=str(error))
            raise Unavailable("the process that reads requests cannot be started", retry_after=RETRY_SECONDS) from None

    async def _replace(self, slot: Slot) -> None:
        """Start a process in the place of a lost one, and only then give back the slot in which it was lost."""
        try:
            self._idle.append(await self._start())
        except (ChildUnusableError, _ChildNotStartedError) as error:
            log.warning("a lost process is not replaced", kind=self._kind, reason=str(error))
        finally:
            slot.leave()

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _waiting(self) -> "_Child | None":
        while self._idle:
            child = self._idle.pop()
            if child.is_alive:
                return child
            await self._end(child)
        return None

    async def close(self) -> None:
        """End all processes, even those at work: their questions, and any later ones, are answered with status 503."""
        self._is_closed = True
        for child in self._running:
            child.kill()
        await self._slots.all_free()  # questions end because their processes have ended
        if left := self._tasks | ({self._renewal} if self._renewal is not None else set()):
            await asyncio.wait(left)
        for child in self._idle:
            await self._end(child)
        self._idle.clear()

    async def _ask(self, child: "_Child", line: bytes, seconds: float) -> list[Any]:
        computed, began = child.cpu_seconds(), monotonic()
        asking = asyncio.create_task(child.ask(line))
        try:
            wait = seconds
            while not (await asyncio.wait({asking}, timeout=wait))[0]:
                used, passed = child.cpu_seconds() - computed, monotonic() - began
                if used >= seconds:
                    raise ChildTooSlowError
                if used < _OWN_SHARE * passed:
                    raise _ChildHeldUpError
                if passed >= _PATIENCE * seconds:
                    raise Unavailable(_BUSY, retry_after=RETRY_SECONDS)
                wait = max(seconds - used, _MIN_WAIT)
            return asking.result()
        except (EOFError, OSError, RuntimeError, ValueError, msgspec.MsgspecError):  # RuntimeError: a closed pipe
            raise ChildDiedError from None
        finally:  # even if the client leaves meanwhile
            await asyncio.shield(self._do(self._release(child, asking)))

    async def _release(self, child: "_Child", asking: asyncio.Task[list[Any]]) -> None:
        if not asking.done():
            await asyncio.wait({asking}, timeout=_LEFT_SECONDS)
        if asking.done() and not asking.cancelled() and asking.exception() is None and not child.is_retired:
            self._idle.append(child)
            if child.is_worn() and self._renewal is None:
                self._renewal = asyncio.create_task(self._renew(child))
            return
        asking.cancel()
        await asyncio.wait({asking})
        if not child.is_retired:
            self._num_lost += 1
        await self._end(child)

    async def _renew(self, old: "_Child") -> None:
        """Replace a process by a new one; the old one goes on until the new one is ready."""
        try:
            new = await self._start()
            log.info("helper process replaced", kind=self._kind, pid=old.pid, by=new.pid)
            self._idle.append(new)
            old.is_retired = True
            if old in self._idle:
                self._idle.remove(old)
                await self._end(old)
        except (ChildUnusableError, _ChildNotStartedError) as error:
            log.warning("helper process not replaced", kind=self._kind, reason=str(error))
        finally:
            self._renewal = None

    async def _start(self) -> "_Child":
        if self._is_closed:
            raise _ChildNotStartedError("the server stops")
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=self._max_answer_bytes,
                env=os.environ | {"RAYON_NUM_THREADS": "1"},  # the libraries' threads
            )
        except OSError as error:  # out of memory, descriptors or processes
            raise _ChildNotStartedError(error.strerror) from None
        child = _Child(process)
        self._running.add(child)
        if self._is_closed:  # closed while the process was starting
            child.kill()
        is_ready = False
        try:
            async with asyncio.timeout(MAX_START_SECONDS):
                answer = await child.line()
            is_ready = not answer
        except (TimeoutError, EOFError, ValueError):
            raise _ChildNotStartedError("it ends, or is silent, before it is ready") from None
        finally:
            if not is_ready:
                await asyncio.shield(self._end(child))
        if not is_ready:
            raise ChildUnusableError(answer[1])
        child.size_when_ready = child.size()
        return child

    async def _end(self, child: "_Child") -> None:
        await child.end()
        self._running.discard(child)


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


class _Child:
    """One running process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._num_questions = 0
        self.size_when_ready = 0
        self.is_retired = False  # it has a successor

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    def is_worn(self) -> bool:
        """Whether it has answered enough questions, or has grown too large."""
        return self._num_questions >= MAX_QUESTIONS or self.size() - self.size_when_ready > MAX_GROWTH

    def size(self) -> int:
        """Bytes of memory that it holds now; 0 if it is gone."""
        return int(self._facts("statm", b"0 0")[1]) * _PAGE_BYTES

    def cpu_seconds(self) -> float:
        """CPU time that it has used so far, in seconds."""
        fields = self._facts("stat", b")" + b" 0" * 20)  # the name before the bracket may contain spaces
        return (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND

    def _facts(self, name: str, none: bytes) -> list[bytes]:
        try:
            with open(f"/proc/{self.pid}/{name}", "rb") as file:
                found = file.read()
        except OSError:
            found = none
        return found.rpartition(b")")[2].split()

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

    async def ask(self, line: bytes) -> list[Any]:
        """Its answer to a question, which is given as JSON in a line."""
        if self._process.stdin is None:
            raise EOFError
        self._num_questions += 1
        self._process.stdin.write(line)
        return await self.line()

    def kill(self) -> None:
        """Kill the process; the task that waits for its answer gets an error."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> None:
        """Kill it, and wait until it and its pipes are gone."""
        self.kill()
        await self._process.wait()
        if self._process.stdin is not None and self._process.stdout is not None:
            self._process.stdin.close()
            with suppress(OSError):
                await self._process.stdin.wait_closed()
            while await self._process.stdout.read(1 << 16):
                pass


# --- in the process ---------------------------------------------------------------------------


def limit_resources(max_file_bytes: int = 0) -> None:
    """Limit this process from now on: memory, the size of files, no core dumps, few descriptors."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))


def answer(line: list[Any]) -> None:
    """Write one line for the parent."""
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()
