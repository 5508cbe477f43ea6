"""The SQLite database of `--data-dir`, shared by all frontends, including those of other launches on this machine.

    read, write ──▶ its own thread ──▶ penstock.sqlite (WAL): readers never wait, one process writes at a time

A write that has returned survives the death of every process (`kill -9`): its pages are in the log file, which the
kernel then has. So `synchronous` is NORMAL: SQLite waits for the disk only when it moves the log into the database. If
the machine itself loses power, the last seconds of writes may be lost, but the database stays consistent. OFF could
leave it damaged, and FULL would make each write wait for the disk.

A disk that is full or nearly so is left as it is: see `room.py`.
"""

import asyncio
import errno
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog

from penstock.config import ConfigError
from penstock.frontend.errors import ServerError
from penstock.frontend.storage.room import Room
from penstock.frontend.storage.schema import STEPS

log = structlog.get_logger()

T = TypeVar("T")

FILE_NAME = "penstock.sqlite"

_LOCK_SECONDS = 10.0
"""How long a write waits for other processes' writes; each takes milliseconds."""

_LOCKED_SECONDS = 0.02
"""Time between two tries where SQLite itself does not wait."""

_LOG_BYTES = 16 << 20
"""The size to which the log file shrinks again after a large write."""


class StorageFull(ServerError, status=507, code="storage_full", may_retry=False):
    """The disk with --data-dir is full."""


class StorageBusy(ServerError, status=503, code="storage_busy"):
    """Other processes keep writing to the database."""


class Database:
    """The database of one folder. Its methods may be called in any event loop, until `close`."""

    def __init__(self, folder: str | Path) -> None:
        """Open the database, and migrate its tables to this version's.

        A full disk does not keep the server from starting: the first use for which there is room opens the database.

        Raises:
            ConfigError: the folder or the file cannot be used, or a later version has written it.
        """
        self.folder = Path(folder)
        self._room = Room(self.folder / FILE_NAME, has_reserve=True)
        self._thread = ThreadPoolExecutor(1, "penstock-storage")
        self._opened: sqlite3.Connection | None = None
        try:
            self._thread.submit(self._connection).result()
        except (sqlite3.Error, OSError) as error:
            if not is_disk_full(error):
                self._thread.shutdown()
                raise ConfigError(f"--data-dir {str(folder)!r}: {FILE_NAME} cannot be used: {error}") from None
            log.error("storing failed: the disk is full", folder=str(folder), reason=str(error))
        except ConfigError:
            self._thread.shutdown()
            raise

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return what `work` returns; it runs in the database's thread, and sees one state of the database.

        Raises:
            StorageFull: the disk is too full to open the database.
        """
        return await self._do(work, is_write=False)

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """The same for work that changes something: all of it is done or, if it raises an error, nothing.

        Raises:
            StorageFull: the disk is full.
            StorageBusy: other processes kept writing.
        """
        return await self._do(work, is_write=True)

    async def lease(self, name: str, holder: str, seconds: float) -> bool:
        """Take a lease, or renew one's own; return whether `holder` has it now, for this many seconds.

        Processes on one machine share a clock. Another holder gets the lease once it has expired or was given back.
        """

        def work(file: sqlite3.Connection) -> bool:
            now = time.time()
            taken = file.execute(
                "INSERT INTO leases VALUES (:name, :holder, :until) ON CONFLICT (name) DO UPDATE SET holder = :holder, "
                "until = :until WHERE holder = :holder OR until < :now OR until > :most",
                {"name": name, "holder": holder, "until": now + seconds, "now": now, "most": now + 100 * seconds},
            )  # the last condition: the clock was set back
            return taken.rowcount > 0

        return await self.write(work)

    async def give_back(self, name: str, holder: str) -> None:
        """Give back a lease, if this holder has it."""
        await self.write(lambda file: file.execute("DELETE FROM leases WHERE name = ? AND holder = ?", (name, holder)))

    def close(self) -> None:
        """Finish pending work and close the file; its content stays."""
        self._thread.shutdown()
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    async def _do(self, work: Callable[[sqlite3.Connection], T], *, is_write: bool) -> T:
        def run() -> T:
            file = self._connection()
            try:
                file.execute("BEGIN IMMEDIATE" if is_write else "BEGIN")
                found = work(file)
                if is_write:
                    self._room.check(file)
                file.execute("COMMIT")
            except BaseException as error:
                if file.in_transaction:  # SQLite has rolled some errors back itself
                    file.execute("ROLLBACK")
                if is_write and is_disk_full(error):
                    self._room.regain(file)
                raise
            return found

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except (sqlite3.Error, OSError) as error:
            if is_disk_full(error):
                raise StorageFull("the server's disk is full: nothing can be stored") from error
            if _is_locked(error):
                raise StorageBusy("the server's database is busy", retry_after=1) from error
            raise

    def _connection(self) -> sqlite3.Connection:
        if self._opened is None:
            self._opened = _open(self.folder)
            self._room.take_reserve()
        return self._opened


def _open(folder: Path) -> sqlite3.Connection:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / FILE_NAME
    path.touch(mode=0o600)
    file = sqlite3.connect(
        path, timeout=_LOCK_SECONDS, isolation_level=None, check_same_thread=False
    )  # closed by another
    try:
        if keep_log(file) != "wal":
            raise ConfigError(
                f"--data-dir {str(folder)!r}: its file system has no shared memory, which SQLite's WAL needs"
            )
        file.execute("PRAGMA synchronous = NORMAL")
        file.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        file.execute("PRAGMA foreign_keys = ON")
        _migrate(file, folder)
    except BaseException:
        file.close()
        raise
    return file


def keep_log(file: sqlite3.Connection) -> str:
    """Turn on WAL; return the mode that the file then has.

    SQLite itself does not wait here, whatever its timeout: if processes open a new file together, one would fail.
    """
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return str(file.execute("PRAGMA journal_mode = WAL").fetchone()[0])
        except sqlite3.OperationalError as error:
            if not _is_locked(error) or time.monotonic() > until:
                raise
            time.sleep(_LOCKED_SECONDS)


def _migrate(file: sqlite3.Connection, folder: Path) -> None:
    """Migrate the tables to this version's. Processes that start together take turns; a killed one changes nothing."""
    if _version(file) == len(STEPS):
        return
    file.execute("BEGIN IMMEDIATE")
    try:
        version = _version(file)
        if version > len(STEPS):
            raise ConfigError(
                f"--data-dir {str(folder)!r}: {FILE_NAME} was written by a later version of Penstock "
                f"(schema {version}; this one knows {len(STEPS)})"
            )
        for step in STEPS[version:]:
            for statement in step:
                file.execute(statement)
        file.execute(f"PRAGMA user_version = {len(STEPS)}")
        file.execute("COMMIT")
    except BaseException:
        if file.in_transaction:
            file.execute("ROLLBACK")
        raise


def _version(file: sqlite3.Connection) -> int:
    return int(file.execute("PRAGMA user_version").fetchone()[0])


def _is_locked(error: BaseException) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_disk_full(error: BaseException) -> bool:
    """Whether the error means that the disk, or a quota, is full."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_WRITE
