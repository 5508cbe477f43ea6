"""One process under the supervisor: started, restarted when it dies, and watched.

Where a start takes long, a spare process is kept that has imported everything: `core/launch/spare.py`. Even the first
process is forked from it. While a spare is missing, nothing waits for a new one: a fresh process is started instead.
"""

import asyncio
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

import structlog

from penstock.core.config import Config
from penstock.core.launch.spare import Forked, Spare
from penstock.ipc import process
from penstock.ipc.parent import Word

log = structlog.get_logger()

_MAX_DEATHS, _MAX_DEATHS_AT_WORK = 5, 40
"""A process that never gets ready never will. One that dies while serving may do so because of a request, and finding
the request costs a death for each halving of those that were in flight."""

_DEATHS_WINDOW = 60.0
_SPARE_DELAY = 3.0
"""Seconds from ready to the start of another spare, if the first is gone: waiting requests come first."""

_FORK_SECONDS = 5.0
"""Longest time for a fork on a busy machine; a spare that takes longer is stopped, or broken."""


class ChildPipe:
    """Our end of the pipe over which a process reports (`ipc/parent.py`): each word, and its number."""

    def __init__(self, on_word: Callable[[Word, int], None]) -> None:
        self._on_word = on_word
        self._ours, self.theirs = os.pipe()
        """`theirs` is for the child; `given` closes our copy of it."""
        self._rest = b""
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours, self._read)

    def given(self) -> None:
        """The child has its end: close our copy."""
        os.close(self.theirs)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._ours)
            os.close(self._ours)

    def _read(self) -> None:
        found = os.read(self._ours, 4096)
        if not found:
            self.close()
        *lines, self._rest = (self._rest + found).split(b"\n")
        for line in lines:
            if line:
                word, _, number = line.decode().partition(" ")
                self._on_word(Word(word), int(number or 0))


class Running(Protocol):
    """A process that can be waited for."""

    @property
    def pid(self) -> int:
        """Its id."""

    @property
    def returncode(self) -> int | None:
        """Its exit code; None while it runs."""

    async def wait(self) -> int:
        """Wait for its end; return its exit code."""


class Child:
    """One process that should run: what to start, and the instance that runs now."""

    def __init__(
        self,
        name: str,
        module: str,
        config: Config,
        *arguments: str,
        spare: str = "",
        shared_fds: Mapping[str, int] | None = None,
    ) -> None:
        """
        Args:
            name: what the process is called in `ps` and logs.
            module: the module that it runs.
            config: passed to it.
            arguments: the same at every start.
            spare: the module of its spare; empty for none.
            shared_fds: descriptors that every instance inherits, by the flags that name them.
        """
        self.name = name
        self._module = module
        self._config = config
        self._arguments = arguments
        self._spare_module = spare
        self._shared_fds = shared_fds or {}
        self._spare: Spare | None = None
        self._spare_pipe: ChildPipe | None = None
        self._spare_start: asyncio.Task[None] | None = None
        self._spare_timer: asyncio.TimerHandle | None = None
        self._pipe: ChildPipe | None = None
        self._forked: asyncio.Future[int] | None = None
        self._num_starts = 0
        self._deaths: deque[float] = deque(maxlen=_MAX_DEATHS)
        self._deaths_at_work: deque[float] = deque(maxlen=_MAX_DEATHS_AT_WORK)
        self._is_watched = False
        self._silent_seconds = 0.0
        self.process: Running | None = None
        self.is_ready = asyncio.Event()
        self.is_alone = False
        """Its last word was that it has no worker (the scheduler)."""
        self.on_hung: Callable[[int], None] = lambda pid: None
        """Gets the ids of processes that this one found hanging."""

    async def start(self) -> None:
        """Start the process, or let the spare fork it; `is_ready` is set once it reports ready."""
        self.is_ready.clear()
        self.is_alone = self._is_watched = False
        self._silent_seconds = 0.0
        self._cancel_spare_timer()
        if self._spare_module and not self._num_starts:
            await self._start_spare("--eager", "1")
            if self._spare is not None:
                await self._spare.until_imported()  # a new process would have to import the same
        self.process = await self._fork() or await self._exec()
        self._num_starts += 1

    # --- what it says -------------------------------------------------------------------------

    def _new_pipe(self) -> ChildPipe:
        if self._pipe is not None:
            self._pipe.close()
        self._pipe = ChildPipe(self._on_word)
        return self._pipe

    def _on_word(self, word: Word, number: int) -> None:
        self._silent_seconds = 0.0
        match word:
            case Word.STARTED:
                self._is_watched = True
                if self._forked is not None and not self._forked.done():
                    self._forked.set_result(number)
            case Word.READY:
                self.is_ready.set()
                self._plan_spare()
            case Word.ALIVE | Word.ALONE:
                self._is_watched = True
                self.is_alone = word is Word.ALONE
            case Word.HUNG:
                self.on_hung(number)

    def silent_for(self, passed: float) -> float:
        """Seconds of silence of a process that has begun to report that it is alive.

        Args:
            passed: how long this process has watched since the last call. Time in which this process itself (or the
                whole machine) did not run does not count as silence.
        """
        if self._is_watched and self.process is not None and self.process.returncode is None:
            self._silent_seconds += passed
        return self._silent_seconds

    # --- the ways to start it -----------------------------------------------------------------

    async def _fork(self) -> Running | None:
        """Let the spare fork the process; None if there is no spare that can do it now."""
        if self._spare is None or not self._spare.imported.is_set():
            return None
        pipe = self._new_pipe()
        self._forked = asyncio.get_running_loop().create_future()
        try:
            if self._spare.ask(pipe.theirs, is_replacement=self._num_starts > 0):
                pipe.given()
                async with asyncio.timeout(_FORK_SECONDS):
                    return Forked(await self._forked)
            pipe.given()
        except (TimeoutError, OSError) as error:
            log.warning("the spare does not answer", child=self.name, error=repr(error))
        finally:
            self._forked = None
        await self._drop_spare()
        return None

    async def _exec(self) -> Running:
        pipe = self._new_pipe()
        try:
            return await self._spawn(self._module, pipe, *(["--replaces", "1"] if self._num_starts else []))
        finally:
            pipe.given()

    async def _spawn(
        self, module: str, pipe: ChildPipe, *more: str, fd: int | None = None
    ) -> asyncio.subprocess.Process:
        config_fd = process.pass_config(self._config)
        argv = ["--config-fd", str(config_fd), "--parent-fd", str(pipe.theirs)]
        argv += ["--parent", str(os.getpid()), *self._arguments, *more]
        for flag, descriptor in self._shared_fds.items():
            argv += [flag, str(descriptor)]
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *argv,
                pass_fds=[config_fd, pipe.theirs, *([] if fd is None else [fd]), *self._shared_fds.values()],
                process_group=0,  # so that a terminal's Ctrl-C reaches only the supervisor, which ends all in order
            )
        finally:
            os.close(config_fd)

    # --- the spare ----------------------------------------------------------------------------

    def _plan_spare(self) -> None:
        is_there = self._spare is not None and self._spare.running.returncode is None
        if self._spare_module and not is_there:
            self._cancel_spare_timer()
            self._spare_timer = asyncio.get_running_loop().call_later(_SPARE_DELAY, self._begin_spare)

    def _begin_spare(self) -> None:
        self._spare_start = asyncio.get_running_loop().create_task(self._start_spare())

    def _cancel_spare_timer(self) -> None:
        if self._spare_timer is not None:
            self._spare_timer.cancel()

    async def _start_spare(self, *more: str) -> None:
        await self._drop_spare()
        ours, theirs = socket.socketpair()
        pipe = ChildPipe(self._on_spare_word)
        try:
            turn = ["--turn-fd", str(theirs.fileno())]
            running = await self._spawn(self._spare_module, pipe, *turn, *more, fd=theirs.fileno())
        except OSError as error:
            log.warning("no spare process can be started", child=self.name, reason=str(error))
            ours.close()
            pipe.close()
        else:
            self._spare, self._spare_pipe = Spare(running, ours), pipe
        finally:
            theirs.close()
            pipe.given()

    def _on_spare_word(self, word: Word, _number: int) -> None:
        if word is Word.IMPORTED and self._spare is not None:
            self._spare.imported.set()

    async def _drop_spare(self) -> None:
        spare = self._spare
        if self._spare_pipe is not None:
            self._spare_pipe.close()
            self._spare_pipe = None
        if spare is not None:
            spare.imported.clear()
            await spare.end()
            self._spare = None

    async def end_spare(self) -> None:
        """End the spare, if there is one, and start no other."""
        self._spare_module = ""
        self._cancel_spare_timer()
        if self._spare_start is not None:
            await self._spare_start
        await self._drop_spare()

    # --- its end ------------------------------------------------------------------------------

    @property
    def pids(self) -> set[int]:
        """Of the process and its spare."""
        running = [self.process, self._spare.running if self._spare is not None else None]
        return {each.pid for each in running if each is not None}

    def may_restart(self, now: float) -> bool:
        """Record a death; False if there were too many recently."""
        deaths = self._deaths_at_work if self.is_ready.is_set() else self._deaths
        deaths.append(now)
        return len(deaths) < (deaths.maxlen or 0) or now - deaths[0] > _DEATHS_WINDOW

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process runs."""
        if self.process is not None and self.process.returncode is None:
            # Not the subprocess's own send_signal: it would reap a process that has just died, and keep the exit code.
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    async def ended(self) -> int:
        """Wait for the end; return the exit code."""
        assert self.process is not None
        return await self.process.wait()
