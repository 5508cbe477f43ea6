"""Files: their names and sizes in the database, their bytes in the folder `files` beside it.

    upload ──▶ files/.<id>.part ──▶ files/<id> ──▶ a row in the database: now the file exists
    delete ──▶ the row is removed ──▶ the bytes are removed

So a row always has its file, and files that a dead process left without a row are removed later (`sweep`).
"""

import asyncio
import os
import secrets
import sqlite3
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from msgspec import UNSET

from penstock.frontend.api.service import Service
from penstock.frontend.errors import BodyTooLarge, InvalidParameter, InvalidRequest
from penstock.frontend.storage.database import Database, StorageFull, is_disk_full
from penstock.parts.batches.frontend.files.shapes import FileObject

T = TypeVar("T")

PIECE_BYTES = 256 << 10
"""How much is read or written at a time."""

_ORPHAN_SECONDS = 3600.0
"""After this time, a file without a row cannot belong to an upload in progress."""

_FIELDS = "id, num_bytes, created_at, filename, purpose, expires_at"


class FileNotFound(InvalidRequest, status=404, code="file_not_found"):
    """There is no file with this id, or it is another key's, or has expired."""


class FileInUse(InvalidRequest, status=409, code="file_in_use"):
    """A batch that is not finished reads the file."""


class NoDataDir(InvalidRequest, status=404, code="no_data_dir"):
    """The server has no --data-dir, so it keeps nothing."""


def database_of(service: Service) -> Database:
    """The database of --data-dir.

    Raises:
        NoDataDir: there is none.
    """
    if service.database is None:
        raise NoDataDir("this server keeps no files and no batches: it was started without --data-dir")
    return service.database


async def whole(work: Coroutine[Any, Any, T]) -> T:
    """Wait for the end of work in another thread, even if the caller is cancelled: until then, it uses the file."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for one owner's files."""

    max_bytes: int  # of all files together
    max_file_bytes: int = 512 << 20  # as OpenAI takes
    max_files: int = 1000  # few enough to be listed


class NewFile:
    """A file that is being written; it exists once `FileStore.add` has taken it. Discard it on every other path."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.id = f"file-{secrets.token_hex(12)}"
        self.num_bytes = 0
        self.path = folder / f".{self.id}.part"
        self._max_bytes = max_bytes
        self._held = bytearray()
        self._file: int | None = None

    async def write(self, piece: bytes) -> None:
        """Append to the file.

        Raises:
            BodyTooLarge: the file becomes too large.
            StorageFull: the disk is full.
        """
        self.num_bytes += len(piece)
        if self._max_bytes and self.num_bytes > self._max_bytes:
            raise BodyTooLarge(f"a file may have at most {self._max_bytes} bytes", param="file")
        self._held += piece
        if len(self._held) >= PIECE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write what is held."""
        held, self._held = bytes(self._held), bytearray()
        await whole(asyncio.to_thread(self._write, held))

    def _write(self, content: bytes) -> None:
        try:
            if self._file is None:
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            left = memoryview(content)
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            if is_disk_full(error):
                raise StorageFull("the server's disk is full: the file is not stored") from None
            raise

    def close(self) -> None:
        """Close the file: nothing more will be written."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def discard(self) -> None:
        """Remove the file. Idempotent; harmless once the file was taken."""
        self.close()
        with suppress(FileNotFoundError):
            self.path.unlink()


class FileStore:
    """The files of one database."""

    def __init__(self, database: Database, limits: Limits) -> None:
        self._database = database
        self._limits = limits
        self._folder = database.folder / "files"

    async def begin(self) -> NewFile:
        """Begin to write a client's file."""
        await asyncio.to_thread(self._folder.mkdir, mode=0o700, exist_ok=True)
        return NewFile(self._folder, self._limits.max_file_bytes)

    async def begin_output(self) -> NewFile:
        """Begin to write a batch's output, which may have any size."""
        await asyncio.to_thread(self._folder.mkdir, mode=0o700, exist_ok=True)
        return NewFile(self._folder, 0)

    async def add(self, new: NewFile, owner: str, filename: str, seconds: int | None) -> FileObject:
        """Publish a client's file that has been written; it stays for this many seconds, or until it is deleted.

        Raises:
            InvalidRequest: the owner would have too many files, or too many bytes.
        """
        await new.flush()
        limits = self._limits

        def work(file: sqlite3.Connection) -> FileObject:
            count, used = file.execute(
                "SELECT count(*), coalesce(sum(num_bytes), 0) FROM files WHERE owner = ?", (owner,)
            ).fetchone()
            if count >= limits.max_files:
                raise InvalidRequest(f"{count} files are stored for this key; at most {limits.max_files} may be")
            if used + new.num_bytes > limits.max_bytes:
                raise InvalidRequest(
                    f"files of {used} bytes are stored for this key; with {new.num_bytes} more they would exceed "
                    f"the {limits.max_bytes} that it may have"
                )
            return self.take(file, new, owner, filename, "batch", seconds)

        return await whole(self._database.write(work))

    def take(
        self, file: sqlite3.Connection, new: NewFile, owner: str, filename: str, purpose: str, seconds: int | None
    ) -> FileObject:
        """Within a transaction, make a written file one of the owner's. Discard it only when the transaction is over.

        Raises:
            FileNotFoundError: the file was discarded.
        """
        new.close()
        now = int(time.time())
        taken = self.path(new.id)
        if not taken.exists():  # it does if an earlier transaction moved the file, but could not be committed
            new.path.rename(taken)
        row = (new.id, new.num_bytes, now, filename, purpose, None if seconds is None else now + seconds)
        file.execute(f"INSERT INTO files ({_FIELDS}, owner) VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, owner))
        return _shown(row)

    async def get(self, owner: str, file_id: str) -> FileObject:
        """A file's facts.

        Raises:
            FileNotFound: it is not there.
        """
        row = await self._database.read(
            lambda file: file.execute(
                f"SELECT {_FIELDS} FROM files WHERE owner = ? AND id = ? AND coalesce(expires_at > ?, 1)",
                (owner, file_id, time.time()),
            ).fetchone()
        )
        if row is None:
            raise FileNotFound(f"file {file_id[:128]!r} not found or deleted", param="file_id")
        return _shown(row)

    async def page(
        self, owner: str, purpose: str | None, after: str | None, limit: int, *, newest_first: bool
    ) -> tuple[list[FileObject], bool]:
        """Files of an owner, by age, after the file `after`; and whether there are more.

        Raises:
            InvalidParameter: there is no file `after`.
        """
        compare, order = ("<", "DESC") if newest_first else (">", "ASC")

        def work(file: sqlite3.Connection) -> list[tuple[Any, ...]]:
            where, values = "owner = ? AND coalesce(expires_at > ?, 1)", [owner, time.time()]
            if purpose is not None:
                where, values = f"{where} AND purpose = ?", [*values, purpose]
            if after is not None:
                found = file.execute("SELECT number FROM files WHERE owner = ? AND id = ?", (owner, after)).fetchone()
                if found is None:
                    raise InvalidParameter(f"after: there is no file {after[:128]!r}", param="after")
                where, values = f"{where} AND number {compare} ?", [*values, found[0]]
            return file.execute(
                f"SELECT {_FIELDS} FROM files WHERE {where} ORDER BY number {order} LIMIT ?", (*values, limit + 1)
            ).fetchall()

        rows = await self._database.read(work)
        return [_shown(row) for row in rows[:limit]], len(rows) > limit

    async def delete(self, owner: str, file_id: str) -> None:
        """Delete a file.

        Raises:
            FileNotFound: it is not there.
            FileInUse: a batch that is not finished reads it.
        """

        def work(file: sqlite3.Connection) -> int:
            [batch] = file.execute(
                "SELECT max(id) FROM batches WHERE owner = ? AND input_file_id = ? AND is_live", (owner, file_id)
            ).fetchone()
            if batch is not None:
                raise FileInUse(f"{batch} reads this file; cancel it first, or wait for its end")
            return file.execute("DELETE FROM files WHERE owner = ? AND id = ?", (owner, file_id)).rowcount

        if not await self._database.write(work):
            raise FileNotFound(f"file {file_id[:128]!r} not found or deleted", param="file_id")
        await asyncio.to_thread(self.path(file_id).unlink, missing_ok=True)

    def path(self, file_id: str) -> Path:
        """The path of an existing file's bytes."""
        return self._folder / file_id

    async def content(self, file_id: str) -> AsyncGenerator[bytes, None]:
        """The bytes of an existing file, in pieces."""
        opened = self.path(file_id).open("rb")
        try:
            while piece := await asyncio.to_thread(opened.read, PIECE_BYTES):
                yield piece
        finally:
            opened.close()

    async def sweep(self) -> None:
        """Remove expired files, except those that a batch still reads, and what dead processes have left."""
        now = time.time()

        def work(file: sqlite3.Connection) -> tuple[set[str], set[str]]:
            expired = file.execute(
                "DELETE FROM files WHERE expires_at <= ? "
                "AND id NOT IN (SELECT input_file_id FROM batches WHERE is_live) RETURNING id",
                (now,),
            ).fetchall()
            return {each for (each,) in expired}, {each for (each,) in file.execute("SELECT id FROM files")}

        expired, known = await self._database.write(work)
        await asyncio.to_thread(self._remove_strangers, expired, known, now)

    def _remove_strangers(self, expired: set[str], known: set[str], now: float) -> None:
        if not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):
                is_orphan = path.name not in known and path.stat().st_mtime < now - _ORPHAN_SECONDS
                if is_orphan or path.name in expired:
                    path.unlink()


def _shown(row: tuple[Any, ...]) -> FileObject:
    file_id, num_bytes, created_at, filename, purpose, expires_at = row
    until = UNSET if expires_at is None else expires_at
    return FileObject(file_id, num_bytes, created_at, filename, purpose, expires_at=until)
