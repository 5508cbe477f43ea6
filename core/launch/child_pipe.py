"""The supervisor's end of the pipe over which a child says how it does (`ipc/parent.py`)."""

import asyncio
import os
from collections.abc import Callable

from penstock.ipc.parent import Word


class ChildPipe:
    """Reads what one process says, and hands on each word with its number (0 if it has none)."""

    def __init__(self, on_word: Callable[[Word, int], None]) -> None:
        self._on_word = on_word
        self._ours, self.theirs = os.pipe()
        """`theirs` is for the child; `given` closes our copy of it."""
        self._rest = b""
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours, self._read)

    def given(self) -> None:
        """The child has its end."""
        os.close(self.theirs)

    def close(self) -> None:
        """Listen no more. Idempotent."""
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
