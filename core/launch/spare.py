"""The spare: a process that has imported what a worker needs, and forks a worker whenever one is needed.

    supervisor --a descriptor--> spare --fork--> (ends at once) --fork--> worker: says "started PID" on that descriptor

Importing takes seconds, and much longer on a busy machine; a fork takes ten milliseconds, however often workers die.
The worker becomes the supervisor's own child, as its nearest ancestor that adopts orphans (`adopt_orphans`).
"""

import asyncio
import ctypes
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

from penstock.ipc.parent import FIRST, REPLACEMENT

_PR_SET_CHILD_SUBREAPER = 36


class Forked:
    """A worker that the spare made; it can be waited for like a subprocess."""

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
    """The supervisor's side of a running spare."""

    def __init__(self, running: asyncio.subprocess.Process, turn: socket.socket) -> None:
        self.running = running
        self._turn = turn
        self.imported = asyncio.Event()
        """Set by whoever receives that word."""

    async def until_imported(self) -> None:
        """Wait until it has imported, or has ended."""
        waits = [asyncio.create_task(self.imported.wait()), asyncio.create_task(self.running.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def ask(self, descriptor: int, *, is_replacement: bool) -> bool:
        """Let it fork a worker with this descriptor as its pipe to the parent; False if it cannot."""
        if not self.imported.is_set() or self.running.returncode is not None:
            return False
        try:
            socket.send_fds(self._turn, [REPLACEMENT if is_replacement else FIRST], [descriptor])
        except OSError:
            return False
        return True

    async def end(self) -> None:
        """End the spare, not the workers that it forked."""
        if self.running.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.running.pid, signal.SIGKILL)  # works even if it is stopped
        await self.running.wait()
        self._turn.close()


def adopt_orphans(*, enabled: bool = True) -> None:
    """From now on, descendants of this process whose parents end become its own children (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0)


def reap_strangers(known: set[int]) -> None:
    """Reap adopted children that nobody waits for: the helpers of a frontend that was killed."""
    with suppress(OSError):
        own = os.getpid()
        for pid in map(int, Path(f"/proc/{own}/task/{own}/children").read_text().split()):
            if pid not in known:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
