"""Whoever waits for the database may be cancelled: a file is then stored with its content, or not at all."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.frontend.storage.database import FILE_NAME, Database
from penstock.parts.batches.frontend.course import Course
from penstock.parts.batches.frontend.files.store import FileStore, Limits
from penstock.parts.batches.frontend.shapes import Batch
from penstock.parts.batches.frontend.store import BatchStore

CONTENT = b'{"an": "answer"}\n'


class LockedDatabase(Database):
    """A database to which another process writes, from its first write after `lock` until `unlock`."""

    waits: asyncio.Event | None = None
    _other: sqlite3.Connection

    def lock(self) -> asyncio.Event:
        """Lock the database; the event tells that a write waits."""
        self._other = sqlite3.connect(self.folder / FILE_NAME, isolation_level=None)
        self._other.execute("BEGIN IMMEDIATE")
        self.waits = asyncio.Event()
        return self.waits

    def unlock(self) -> None:
        self._other.execute("COMMIT")
        self._other.close()

    async def write(self, work: Callable[[sqlite3.Connection], Any]) -> Any:
        if self.waits is not None:
            self.waits.set()
        return await super().write(work)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[LockedDatabase]:
    opened = LockedDatabase(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def files(database: LockedDatabase) -> FileStore:
    return FileStore(database, Limits(1 << 30, 1 << 20, 10))


async def cancel_while_it_waits(database: LockedDatabase, work: Any) -> None:
    """Begin work that writes, and cancel it twice before it can."""
    waits = database.lock()
    task = asyncio.create_task(work)
    await waits.wait()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.01)
    is_over = task.done()
    database.unlock()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_over


async def content_of(files: FileStore, file_id: str) -> bytes:
    return b"".join([piece async for piece in files.content(file_id)])


async def test_an_upload(database: LockedDatabase, files: FileStore) -> None:
    new = await files.begin()
    await new.write(CONTENT)

    async def upload() -> None:
        try:
            await files.add(new, "me", "in.jsonl", None)
        finally:
            new.discard()

    await cancel_while_it_waits(database, upload())
    listed, _ = await files.page("me", None, None, 10, newest_first=True)
    assert [each.id for each in listed] == [new.id]
    assert await content_of(files, new.id) == CONTENT


async def test_the_end_of_a_batch(database: LockedDatabase, files: FileStore) -> None:
    given = await files.begin()
    stored = await files.add(given, "me", "in.jsonl", None)  # an empty file: no line is missing
    batches, until = BatchStore(database), int(time.time()) + 999
    batch = Batch("batch_1", "/v1/completions", stored.id, "24h", "finalizing", created_at=1, expires_at=until)
    await batches.create("me", "me", batch)
    [live] = await batches.live()
    await batches.put(live.number, 1, CONTENT, is_error=False)
    service: Any = SimpleNamespace()
    start: Any = None
    course = Course(service, batches, files, live, start)
    await cancel_while_it_waits(database, course.run())
    ended = await batches.get("me", batch.id)
    assert ended.status == "completed"
    assert ended.output_file_id is not None
    assert await content_of(files, ended.output_file_id) == CONTENT


async def test_a_file_that_was_discarded_is_not_taken(database: LockedDatabase, files: FileStore) -> None:
    new = await files.begin()
    await new.flush()
    new.discard()
    with pytest.raises(FileNotFoundError):
        await database.write(lambda file: files.take(file, new, "me", "a", "batch", None))
    assert await files.page("me", None, None, 10, newest_first=True) == ([], False)
