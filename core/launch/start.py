"""Starts a new process, with the pipe over which it reports (`ipc/parent.py`)."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.config import Config
from penstock.ipc import process
from penstock.ipc.parent import Word


class ChildPipe:
    """Our end of the pipe: passes on each word that arrives, with its number."""

    def __init__(self, on_word: Callable[[Word, int], None]) -> None:
        self._on_word = on_word
        self._ours, self.theirs = os.pipe()
        """`theirs` is for the child; `given` closes our copy of it."""
        self._rest = b""
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours, self._read)

    def given(self) -> None:
        """The child has inherited its end: close our copy."""
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


async def spawn(
    module: str, config: Config, pipe: ChildPipe, arguments: Iterable[str], descriptors: Iterable[int] = ()
) -> asyncio.subprocess.Process:
    """Start a new process of a module, which ends with this one; it inherits these descriptors, and its pipe."""
    config_fd = process.pass_config(config)
    argv = ["--config-fd", str(config_fd), "--parent-fd", str(pipe.theirs), "--parent", str(os.getpid()), *arguments]
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *argv,
            pass_fds=[config_fd, pipe.theirs, *descriptors],
            process_group=0,  # so that a terminal's Ctrl-C reaches only the supervisor, which ends all in order
        )
    finally:
        os.close(config_fd)
