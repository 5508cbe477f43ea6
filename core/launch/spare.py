"""The spare: a process that has imported what a worker needs, and forks a worker for any rank on demand.

    supervisor --arguments, descriptors--> spare --fork--> (ends at once) --fork--> worker: says "started PID"

Importing takes seconds, and much longer on a busy machine. A fork takes ten milliseconds, however often workers die.
The worker becomes the supervisor's own child, because that is its nearest ancestor that adopts orphans
(`adopt_orphans`).
A launch has one spare for all its workers, the first ones included. While it is missing, fresh processes are started;
nothing waits for a new spare.
"""

import asyncio
import ctypes
import json
import os
import signal
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import structlog

from penstock.config import Config
from penstock.core.launch.start import ChildPipe, spawn
from penstock.ipc import process
from penstock.ipc.parent import Word

log = structlog.get_logger()

_PR_SET_CHILD_SUBREAPER = 36

_DELAY = 3.0
"""Seconds from a worker's readiness to the start of a missing spare: waiting requests come first."""

_FORK_SECONDS = 5.0
"""Longest time for a fork on a busy machine; a spare that takes longer is suspended or broken."""


class Forked:
    """A worker that the spare forked; it can be waited for like a subprocess."""

    def __init__(self, pid: int) -> None:
        """Raises OSError if there is no such child."""
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._descriptor = os.pidfd_open(pid)
        self._loop.add_reader(self._descriptor, self._on_end)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()

    async def wait(self) -> int:
        """Wait for its end; return its exit code."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


class Spare:
    """The spare of a launch, and its successors."""

    def __init__(self, module: str, config: Config) -> None:
        """`module`: what it runs. The spare is started at the first request for a fork."""
        self._module = module
        self._config = config
        self._running: asyncio.subprocess.Process | None = None
        self._ending: set[int] = set()
        self._turn: socket.socket | None = None
        self._pipe: ChildPipe | None = None
        self._imported = asyncio.Event()
        self._first: asyncio.Task[None] | None = None
        self._start: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_ended = False
        self.is_starting = False
        """Whether a process may have been started that `pids` does not have yet."""

    @property
    def is_there(self) -> bool:
        """Whether a spare runs."""
        return self._running is not None and self._running.returncode is None

    @property
    def has_imported(self) -> bool:
        """Whether the spare has imported, so that it can fork."""
        return self._imported.is_set()

    @property
    def pids(self) -> set[int]:
        """The process ids of the spare, if there is one, and of those that are waited for."""
        return self._ending if self._running is None else self._ending | {self._running.pid}

    async def fork(
        self, name: str, config: Config, arguments: Sequence[str], descriptor: int, started: "asyncio.Future[int]"
    ) -> Forked | None:
        """Let the spare fork a worker; None if there is no spare that can do it now.

        Args:
            name: the worker's name, for the log.
            config: the worker's configuration.
            arguments: the worker's arguments, without those of configuration and parent.
            descriptor: the worker's end of the pipe over which it reports.
            started: gets the worker's process id once the worker has reported it.
        """
        self._cancel_timer()
        turn = self._turn
        if turn is None or not self.has_imported:
            return None
        config_fd = process.pass_config(config)
        try:
            socket.send_fds(turn, [json.dumps([*arguments]).encode()], [descriptor, config_fd])
            async with asyncio.timeout(_FORK_SECONDS):
                return Forked(await started)
        except (TimeoutError, OSError) as error:
            log.warning("spare unresponsive", child=name, error=repr(error))
        finally:
            os.close(config_fd)
        if self._turn is turn:  # it may have been replaced meanwhile
            await self._drop()
        return None

    async def until_imported(self) -> None:
        """Wait for the first spare to import: a new process would have to import the same."""
        if self._first is None:
            self._first = asyncio.create_task(self._begin("--eager", "1"))
        await asyncio.wait([self._first])
        if self._running is None:
            return
        waits = [asyncio.create_task(self._imported.wait()), asyncio.create_task(self._running.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def plan(self) -> None:
        """A worker is ready: make sure that there will be a spare for the next one."""
        if not self._has_ended and not self.is_there:
            self._cancel_timer()
            self._timer = asyncio.get_running_loop().call_later(_DELAY, self._begin_later)

    async def end(self) -> None:
        """End the spare, not the workers that it forked, and start no other."""
        self._has_ended = True
        self._cancel_timer()
        starts = [start for start in (self._first, self._start) if start is not None]
        if starts:
            await asyncio.wait(starts)
        await self._drop()

    def _begin_later(self) -> None:
        self._start = asyncio.get_running_loop().create_task(self._begin())

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _begin(self, *more: str) -> None:
        await self._drop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pipe = ChildPipe(self._on_word)
        arguments = ["--turn-fd", str(theirs.fileno()), *more]
        self.is_starting = True
        try:
            self._running = await spawn(self._module, self._config, pipe, arguments, [theirs.fileno()])
        except OSError as error:
            log.warning("spare not started", reason=str(error))
            ours.close()
            pipe.close()
        else:
            self._turn, self._pipe = ours, pipe
        finally:
            self.is_starting = False
            theirs.close()
            pipe.given()

    def _on_word(self, word: Word, _number: int) -> None:
        if word is Word.IMPORTED:
            self._imported.set()

    async def _drop(self) -> None:
        running, turn, pipe = self._running, self._turn, self._pipe
        self._running = self._turn = self._pipe = None
        self._imported.clear()
        if pipe is not None:
            pipe.close()
        if running is not None:
            self._ending.add(running.pid)
            if running.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(running.pid, signal.SIGKILL)  # works even if it is stopped
            try:
                await running.wait()
            finally:
                self._ending.discard(running.pid)
        if turn is not None:
            turn.close()


def adopt_orphans(*, enabled: bool = True) -> None:
    """From now on, descendants of this process whose parents end become its own children (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0)


class Owner(Protocol):
    """Who starts processes, and waits for them."""

    @property
    def pids(self) -> set[int]:
        """Its processes."""

    @property
    def is_starting(self) -> bool:
        """Whether a process may have been started that `pids` does not have yet."""


def reap_strangers(owners: Iterable[Owner]) -> None:
    """Reap adopted children that no owner waits for: the helpers of a frontend that was killed.

    While an owner starts a process nothing is reaped: the process may be dead already, and its owner needs its exit
    code.
    """
    owners = list(owners)
    if any(owner.is_starting for owner in owners):
        return
    known = {pid for owner in owners for pid in owner.pids}
    with suppress(OSError):
        own = os.getpid()
        for pid in map(int, Path(f"/proc/{own}/task/{own}/children").read_text().split()):
            if pid not in known:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
