"""One process under the supervisor, which starts, watches and restarts it."""

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import structlog

from penstock.config import Config
from penstock.core.launch.spare import Spare
from penstock.core.launch.start import ChildPipe, Running, spawn
from penstock.ipc.parent import Word

log = structlog.get_logger()

_MAX_DEATHS, _MAX_DEATHS_AT_WORK = 5, 40
"""A process that dies repeatedly before it is ready will never be ready. One that dies while serving may do so because
of a request, and finding that request costs one death for each halving of those that were in flight."""

_DEATHS_WINDOW = 60.0


_EXITING = 0x4
"""The kernel's flag (PF_EXITING) of a process that is giving up its memory and files, and runs no more code."""


def _is_ending(pid: int) -> bool:
    """Whether a process has died, or is just dying."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return True
    return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _EXITING)


class Child:
    """One process that should run: how to start it, and its current instance."""

    def __init__(
        self,
        name: str,
        module: str,
        config: Config,
        *arguments: str,
        spare: Spare | None = None,
        shared_fds: Mapping[str, int] | None = None,
    ) -> None:
        """
        Args:
            name: what the process is called in `ps` and logs.
            module: the module that it runs.
            config: passed to it.
            arguments: passed at every start.
            spare: forks the process, if that is quicker than starting it.
            shared_fds: descriptors that every instance inherits, by the flags that name them.
        """
        self.name = name
        self._module = module
        self._config = config
        self._arguments = arguments
        self._spare = spare
        self._shared_fds = shared_fds or {}
        self._pipe: ChildPipe | None = None
        self._forked: asyncio.Future[int] | None = None
        self._num_starts = 0
        self._deaths: deque[float] = deque(maxlen=_MAX_DEATHS)
        self._deaths_at_work: deque[float] = deque(maxlen=_MAX_DEATHS_AT_WORK)
        self._is_watched = False
        self._silent_seconds = 0.0
        self.process: Running | None = None
        self.is_ready = asyncio.Event()
        self.is_starting = False
        """Whether it may run already, though `pids` does not have it yet."""
        self.is_alone = False
        """Whether it last reported that it has no worker (the scheduler)."""
        self.on_hung: Callable[[int], None] = lambda pid: None
        """Called with the ids of processes that this one found hanging."""
        self.on_restart: Callable[[], None] = lambda: None
        """Called when it asks for a restart of its engine (the scheduler)."""

    async def start(self) -> None:
        """Start the process, or let the spare fork it; `is_ready` is set once it reports ready."""
        self.is_ready.clear()
        self.is_alone = self._is_watched = False
        self._silent_seconds = 0.0
        arguments = [*self._arguments, *(["--replaces", "1"] if self._num_starts else [])]
        if self._spare is not None and not self._num_starts:
            await self._spare.until_imported()
        self.is_starting = True
        try:
            self.process = await self._fork(arguments) or await self._spawn(arguments)
        finally:
            self.is_starting = False
        self._num_starts += 1

    async def _fork(self, arguments: list[str]) -> Running | None:
        if self._spare is None:
            return None
        pipe = self._new_pipe()
        self._forked = asyncio.get_running_loop().create_future()
        try:
            return await self._spare.fork(self.name, self._config, arguments, pipe.theirs, self._forked)
        finally:
            self._forked = None
            pipe.given()

    async def _spawn(self, arguments: list[str]) -> Running:
        pipe = self._new_pipe()
        for flag, descriptor in self._shared_fds.items():
            arguments += [flag, str(descriptor)]
        try:
            return await spawn(self._module, self._config, pipe, arguments, self._shared_fds.values())
        finally:
            pipe.given()

    # --- its reports --------------------------------------------------------------------------

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
                if self._spare is not None:
                    self._spare.plan()
            case Word.ALIVE | Word.ALONE:
                self._is_watched = True
                self.is_alone = word is Word.ALONE
            case Word.HUNG:
                self.on_hung(number)
            case Word.RESTART:
                self.on_restart()

    def silent_for(self, passed: float) -> float:
        """Return the seconds of silence of a process that has begun to report that it is alive.

        Args:
            passed: how long this process has watched since the last call. Time in which the watching process (or the
                whole machine) did not run does not count as silence.
        """
        if self._is_watched and self.process is not None and self.process.returncode is None:
            self._silent_seconds += passed
        return self._silent_seconds

    def kill_if_silent(self, passed: float, patience: float) -> None:
        """Kill it if it has been silent for more than `patience` seconds; `passed` is as for `silent_for`."""
        if self.silent_for(passed) > patience:
            log.error("process unresponsive, killing", child=self.name)
            self.signal(signal.SIGKILL)

    # --- its end ------------------------------------------------------------------------------

    @property
    def pids(self) -> set[int]:
        """The process's id, if it was started."""
        return set() if self.process is None else {self.process.pid}

    @property
    def is_ending(self) -> bool:
        """Whether the process has died, or is just dying, although its end has not been noticed yet."""
        return any(map(_is_ending, self.pids))

    def may_restart(self, now: float) -> bool:
        """Record a death; False if there were too many recently."""
        deaths = self._deaths_at_work if self.is_ready.is_set() else self._deaths
        deaths.append(now)
        return len(deaths) < (deaths.maxlen or 0) or now - deaths[0] > _DEATHS_WINDOW

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process runs."""
        if self.process is not None and self.process.returncode is None:
            # Not the subprocess's own send_signal: it would reap a process that has just died, and keep its exit code.
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    async def ended(self) -> int:
        """Wait for the end; return the exit code."""
        assert self.process is not None
        return await self.process.wait()
