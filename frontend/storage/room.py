"""Room on the disk for SQLite's write-ahead log, so that a disk that is nearly full can be emptied again.

Whatever is written, and whatever is deleted, comes into the log first. The log becomes empty only when it is moved into
the database, which needs room there if the database has become larger. Without precautions the log takes the last room:
then it can never be moved, and nothing can be written or deleted any more. Therefore

    growth       a transaction that makes the database larger must leave room to move all of the log (`check`)
    a reserve    a file beside the database takes some room that nobody else gets; when the disk is full, it is given
                 up, the log is moved and cut off, and the reserve is taken again if that leaves room (`regain`)

A deletion makes nothing larger, so the room of a log that was just emptied is enough for it.
"""

import errno
import os
import sqlite3
from contextlib import suppress
from pathlib import Path

import structlog

log = structlog.get_logger()

RESERVE_NAME = "penstock.reserve"
RESERVE_BYTES = 8 << 20

MIN_LOG_BYTES = 4 << 20
"""Room for the log that is left when others' is taken: SQLite keeps up to 2 MiB of a transaction outside of it."""


class Room:
    """What is free for one database."""

    def __init__(self, database: Path, *, has_reserve: bool) -> None:
        self._database = database
        self._reserve = database.with_name(RESERVE_NAME) if has_reserve else None

    def check(self, file: sqlite3.Connection) -> None:
        """Raise OSError if the transaction makes the database larger than the disk would later allow."""
        [[num_pages]], [[page_bytes]] = file.execute("PRAGMA page_count"), file.execute("PRAGMA page_size")
        growth = num_pages * page_bytes - self._database.stat().st_size
        if growth > 0 and growth + MIN_LOG_BYTES > self._free():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def regain(self, file: sqlite3.Connection) -> None:
        """Empty the log of a full disk."""
        if self._reserve is not None:
            with suppress(OSError):
                os.truncate(self._reserve, 0)
        try:
            file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error as error:
            log.error("the database's log cannot be emptied", reason=str(error))
        self.take_reserve()

    def take_reserve(self) -> None:
        """Take the reserve, if there is room for it and more; otherwise it is left out until there is."""
        if self._reserve is None:
            return
        try:
            with self._reserve.open("ab") as file:
                os.fchmod(file.fileno(), 0o600)
                missing = RESERVE_BYTES - os.fstat(file.fileno()).st_size
                if missing > 0 and self._free() >= missing + MIN_LOG_BYTES:
                    os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        except OSError as error:
            log.warning("no room is reserved for a full disk", reason=str(error))

    def _free(self) -> int:
        found = os.statvfs(self._database.parent)
        return found.f_bavail * found.f_frsize
