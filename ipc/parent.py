"""What a process reports to the parent that started it: one word per line, over a pipe (`--parent-fd N`).

imported     a spare: it can fork workers
started PID  a spare: it has forked this worker
ready        it can do its work
alive        its loop turns; said every heartbeat interval while it does
alone        the scheduler: the same, and no worker is connected
restart      the scheduler: it has been drained, and its engine is to be started again
hung PID     the scheduler: that process no longer responds
"""

import asyncio
import os
import threading
from contextlib import suppress
from enum import StrEnum
from time import sleep

from penstock.ipc.process import options_of


class Word(StrEnum):
    """All possible words."""

    IMPORTED = "imported"
    STARTED = "started"
    READY = "ready"
    ALIVE = "alive"
    ALONE = "alone"
    RESTART = "restart"
    HUNG = "hung"


class Parent:
    """The pipe to the parent. Without a parent, nothing is sent."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            os.set_blocking(descriptor, False)

    @classmethod
    def of(cls, argv: list[str]) -> "Parent":
        """The parent that the arguments name."""
        value = options_of(argv).get("--parent-fd")
        return cls(None if value is None else int(value))

    def tell(self, word: Word, pid: int | None = None) -> None:
        """Send a word. It is lost if the parent is gone, or has not read for hours."""
        if self._descriptor is not None:
            line = word if pid is None else f"{word} {pid}"
            with suppress(OSError):
                os.write(self._descriptor, f"{line}\n".encode())

    @property
    def listens(self) -> bool:
        """Whether the pipe still has a reader."""
        if self._descriptor is None:
            return False
        try:
            os.write(self._descriptor, b"\n")
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    async def keep_telling(self, interval: float) -> None:
        """Report every `interval` seconds that the event loop turns, for as long as it does."""
        while True:
            self.tell(Word.ALIVE)
            await asyncio.sleep(interval)

    def keep_telling_in_a_thread(self, interval: float) -> None:
        """The same for a process without an event loop; shows that the process lives, not that it makes progress."""

        def run() -> None:
            while True:
                self.tell(Word.ALIVE)
                sleep(interval)

        if self._descriptor is not None:
            threading.Thread(target=run, name="alive", daemon=True).start()
