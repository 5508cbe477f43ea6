"""A SQLite file only for stored responses and conversations, without --data-dir: it is removed with the launch.

It has the tables that `schema.CONVERSED` and `schema.REFERRED` make, and the methods of `Database` that they need.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from penstock.config import ConfigError
from penstock.frontend.storage.database import StorageFull, is_disk_full, keep_log
from penstock.frontend.storage.room import Room
from penstock.frontend.storage.schema import CONVERSED, REFERRED

log = structlog.get_logger()

T = TypeVar("T")

IN_MEMORY = ":memory:"

_LOCK_SECONDS = 10.0
"""How long a write waits for other frontends' writes; each takes milliseconds."""


class Tables(Protocol):
    """The database that has the tables."""

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return what `work` returns; it runs in a thread."""
        ...

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """The same for work that changes something: all of it is done, or nothing."""
        ...


class OwnFile:
    """The file; lives in a running event loop until `close`."""

    def __init__(self, path: str) -> None:
        """If the disk is full, a restarted frontend continues with empty tables in memory.

        Raises:
            ConfigError: if the file cannot be used.
        """
        self._room: Room | None
        self._thread = ThreadPoolExecutor(1, "penstock-responses")
        try:
            self._file = self._thread.submit(_open, path).result()
            self._room = None if path == IN_MEMORY else Room(Path(path), has_reserve=False)
        except (sqlite3.Error, OSError) as error:
            if not is_disk_full(error):
                self._thread.shutdown()
                raise ConfigError(f"stored responses: {path!r} cannot be used: {error}") from None
            log.error("responses are stored in memory: the disk is full", file=path, reason=str(error))
            self._file = self._thread.submit(_open, IN_MEMORY).result()
            self._room = None

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """See `Tables`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._file)

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """See `Tables`.

        Raises:
            StorageFull: the disk is full.
        """

        def run() -> T:
            try:
                with self._file:
                    found = work(self._file)
                    if self._room is not None:
                        self._room.check(self._file)
                    return found
            except (sqlite3.Error, OSError) as error:
                if not is_disk_full(error):
                    raise
                if self._room is not None:
                    self._room.regain(self._file)
                raise StorageFull("the server's disk is full: nothing can be stored") from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    def close(self) -> None:
        """Close the file; its content stays."""
        self._thread.shutdown()
        self._file.close()


def _open(path: str) -> sqlite3.Connection:
    if path != IN_MEMORY:
        Path(path).touch(mode=0o600)
    file = sqlite3.connect(path, timeout=_LOCK_SECONDS, check_same_thread=False)  # another thread closes it
    keep_log(file)
    file.execute("PRAGMA synchronous = OFF")  # a crash of the machine may lose responses; a process's does not
    file.execute("PRAGMA foreign_keys = ON")
    with file:
        file.execute("BEGIN IMMEDIATE")  # so that of frontends that open an older file together, one migrates it
        for statement in (*CONVERSED, *REFERRED):
            file.execute(statement)
    return file
