"""One process under the supervisor: started, started again when it died, with a spare at hand if that takes long.

A spare is a second process that has imported everything and waits for its turn: it has no weights and no socket. When
the first one dies, the spare is told to go on as it, and loading is all that is left to do.
"""

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from penstock.core.config import Config
from penstock.ipc import process

_MAX_DEATHS, _MAX_DEATHS_AT_WORK = 5, 40
"""One that never gets ready has no future. One that dies at work may do so because of a request, and finding that
one costs a death for each halving of those that were in flight."""

_DEATHS_WINDOW = 60.0
_SPARE_DELAY = 3.0
"""Seconds from ready to the start of a spare. It takes a core for a while, and who waited for ready comes first."""


class _Started:
    """A process, and the ends of its pipes that are ours."""

    def __init__(self, running: asyncio.subprocess.Process, ready_read: int, turn_write: int | None) -> None:
        self.running = running
        self.ready_read = ready_read
        self.turn_write = turn_write  # of a spare that waits

    def take_turn(self) -> None:
        """Let a spare go on; a process that is no spare does so by itself."""
        if self.turn_write is not None:
            os.write(self.turn_write, process.READY)
            os.close(self.turn_write)
            self.turn_write = None


class Child:
    """One process that should run: what to start, and the one that runs now."""

    def __init__(
        self,
        name: str,
        module: str,
        config: Config,
        index: int = 0,
        *,
        has_spare: bool = False,
        shared_fds: Mapping[str, int] | None = None,
    ) -> None:
        """`shared_fds`: descriptors that every start of it inherits, by the flags that name them to it."""
        self.name = name
        self._module = module
        self._config = config
        self._index = index
        self._has_spare = has_spare
        self._shared_fds = shared_fds or {}
        self._spare: _Started | None = None
        self._spare_start: asyncio.Task[None] | None = None
        self._spare_timer: asyncio.TimerHandle | None = None
        self._deaths: deque[float] = deque(maxlen=_MAX_DEATHS)
        self._deaths_at_work: deque[float] = deque(maxlen=_MAX_DEATHS_AT_WORK)
        self.process: asyncio.subprocess.Process | None = None
        self.is_ready = asyncio.Event()
        self.on_hung: Callable[[int], None] = lambda pid: None
        """Told the ids of processes that this one found hanging."""

    async def start(self) -> None:
        """Start the process, or let the spare be it; `is_ready` is set once it says so."""
        self.is_ready.clear()
        self._cancel_spare_timer()
        if self._spare_start is not None:
            await asyncio.shield(self._spare_start)
        spare, self._spare = self._spare, None
        if spare is not None and spare.running.returncode is not None:
            _close(spare)
            spare = None
        started = spare or await self._start(is_spare=False)
        self.process = started.running
        started.take_turn()
        asyncio.get_running_loop().add_reader(started.ready_read, self._on_ready_pipe, started.ready_read)

    async def _start(self, *, is_spare: bool) -> _Started:
        config_fd = process.pass_config(self._config)
        ready_read, ready_write = os.pipe()
        turn_read, turn_write = os.pipe() if is_spare else (None, None)
        argv = ["--config-fd", str(config_fd), "--ready-fd", str(ready_write)]
        argv += ["--parent", str(os.getpid()), "--index", str(self._index)]
        for flag, descriptor in self._shared_fds.items():
            argv += [flag, str(descriptor)]
        passed = [config_fd, ready_write]
        if turn_read is not None:
            argv += ["--turn-fd", str(turn_read)]
            passed.append(turn_read)
        try:
            running = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"{self._module}.spare" if is_spare else self._module,
                *argv,
                pass_fds=[*passed, *self._shared_fds.values()],
                process_group=0,  # a terminal's Ctrl-C reaches the supervisor alone, which ends all in the right order
            )
        finally:
            for descriptor in passed:
                os.close(descriptor)
        return _Started(running, ready_read, turn_write)

    def _on_ready_pipe(self, descriptor: int) -> None:
        lines = os.read(descriptor, 4096).split()
        for line in lines:
            if line == process.READY:
                self.is_ready.set()
                if self._has_spare and self._spare is None:
                    self._cancel_spare_timer()
                    self._spare_timer = asyncio.get_running_loop().call_later(_SPARE_DELAY, self._begin_spare)
            else:
                self.on_hung(int(line))
        if not lines:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)

    def _begin_spare(self) -> None:
        self._spare_start = asyncio.get_running_loop().create_task(self._start_spare())

    def _cancel_spare_timer(self) -> None:
        if self._spare_timer is not None:
            self._spare_timer.cancel()

    async def _start_spare(self) -> None:
        self._spare = await self._start(is_spare=True)

    def may_restart(self, now: float) -> bool:
        """Note a death; False if there were too many of late."""
        deaths = self._deaths_at_work if self.is_ready.is_set() else self._deaths
        deaths.append(now)
        return len(deaths) < (deaths.maxlen or 0) or now - deaths[0] > _DEATHS_WINDOW

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self.process is not None and self.process.returncode is None:
            # Not its own send_signal: that would take the exit code of a process that has just died for itself.
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    async def ended(self) -> int:
        """Wait for the end; the exit code."""
        assert self.process is not None
        return await self.process.wait()

    async def end_spare(self) -> None:
        """End the process that waits for its turn, if there is one; there will be no other."""
        self._has_spare = False
        self._cancel_spare_timer()
        if self._spare_start is not None:
            await self._spare_start
        if self._spare is not None:
            if self._spare.running.returncode is None:
                self._spare.running.kill()
            await self._spare.running.wait()
            _close(self._spare)
            self._spare = None


def _close(spare: _Started) -> None:
    """Close the pipes of a spare that never had its turn."""
    os.close(spare.ready_read)
    if spare.turn_write is not None:
        os.close(spare.turn_write)
