"""The database of --data-dir: shared by processes, whole after each death, moved from version to version."""

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.config import Config, ConfigError, FrontendOptions
from penstock.core.launch.output_files import check_output_files
from penstock.frontend.storage import database
from penstock.frontend.storage.database import FILE_NAME, Database, StorageBusy, StorageFull
from penstock.frontend.storage.room import MIN_LOG_BYTES, RESERVE_BYTES, RESERVE_NAME, Room
from penstock.frontend.storage.schema import STEPS
from penstock.parts.responses.frontend.storage.own_file import OwnFile


def with_folder(folder: Path) -> Config:
    return replace(Config(), frontend=FrontendOptions(data_dir=str(folder)))


def make(file: sqlite3.Connection) -> None:
    file.execute("CREATE TABLE t (x INTEGER PRIMARY KEY)")


async def test_what_is_written_is_there_after_another_opening(tmp_path: Path) -> None:
    first = Database(tmp_path)
    await first.write(make)
    await first.write(lambda file: file.execute("INSERT INTO t VALUES (7)"))
    second = Database(tmp_path)  # as another frontend has it
    assert await second.read(lambda file: file.execute("SELECT x FROM t").fetchall()) == [(7,)]
    first.close()
    second.close()


async def test_work_is_done_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    storage = Database(tmp_path)
    await storage.write(make)

    def half(file: sqlite3.Connection) -> None:
        file.execute("INSERT INTO t VALUES (1)")
        raise KeyError

    with pytest.raises(KeyError):
        await storage.write(half)
    assert await storage.read(lambda file: file.execute("SELECT count(*) FROM t").fetchone()) == (0,)
    storage.close()


WRITER = """
import asyncio, sys
from penstock.frontend.storage.database import Database
async def main():
    storage = Database(sys.argv[1])
    for i in range(1_000_000):
        await storage.write(lambda file: file.execute("INSERT INTO t VALUES (?)", (i,)))
        print(i, flush=True)
asyncio.run(main())
"""


def test_nothing_acknowledged_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    storage = Database(tmp_path)
    asyncio.run(storage.write(make))
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        lines = [next(writer.stdout) for _ in range(200)]
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged = int([*lines, *writer.stdout][-1])
    [count] = asyncio.run(storage.read(lambda file: file.execute("SELECT count(*) FROM t").fetchone()))
    assert count >= acknowledged + 1
    assert asyncio.run(storage.read(lambda file: file.execute("PRAGMA integrity_check").fetchone())) == ("ok",)
    storage.close()


async def test_an_older_version_is_brought_up_by_whoever_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Database(tmp_path).close()
    added = ("CREATE TABLE added (x)", "INSERT INTO added VALUES (1)")
    monkeypatch.setattr(database, "STEPS", (*STEPS, added))
    stores = await asyncio.gather(*(asyncio.to_thread(Database, tmp_path) for _ in range(4)))
    for storage in stores:
        assert await storage.read(lambda file: file.execute("SELECT x FROM added").fetchall()) == [(1,)]
        storage.close()
    monkeypatch.setattr(database, "STEPS", STEPS)
    with pytest.raises(ConfigError, match="later version"):
        Database(tmp_path)


async def test_a_step_that_fails_leaves_the_version_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Database(tmp_path).close()
    monkeypatch.setattr(database, "STEPS", (*STEPS, ("CREATE TABLE added (x)", "no SQL")))
    with pytest.raises(ConfigError, match="--data-dir"):
        Database(tmp_path)
    monkeypatch.setattr(database, "STEPS", STEPS)
    storage = Database(tmp_path)
    tables = await storage.read(lambda file: file.execute("SELECT name FROM sqlite_master").fetchall())
    assert ("added",) not in tables
    storage.close()


async def test_one_holder_has_a_lease_at_a_time(tmp_path: Path) -> None:
    storage = Database(tmp_path)
    assert await storage.lease("runner", "a", 600)
    assert not await storage.lease("runner", "b", 600)
    assert await storage.lease("other", "b", 600)
    assert await storage.lease("runner", "a", -1)  # prolonged, and over
    assert await storage.lease("runner", "b", 600)
    await storage.give_back("runner", "a")  # no longer its own
    assert not await storage.lease("runner", "a", 600)
    await storage.give_back("runner", "b")
    assert await storage.lease("runner", "a", 600)
    storage.close()


async def test_a_full_disk_is_told_and_forgotten_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Database(tmp_path)
    await storage.write(make)
    pages = await storage.read(lambda file: file.execute("PRAGMA page_count").fetchone()[0])
    await storage.write(lambda file: file.execute(f"PRAGMA max_page_count = {pages}").fetchone())

    def fill(file: sqlite3.Connection) -> None:
        file.execute("CREATE TABLE big AS SELECT randomblob(100000) AS x")

    with pytest.raises(StorageFull):
        await storage.write(fill)
    await storage.write(lambda file: file.execute("PRAGMA max_page_count = 1000000").fetchone())
    await storage.write(fill)
    storage.close()

    opened = database._open

    def without_room(folder: Path) -> sqlite3.Connection:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(database, "_open", without_room)
    storage = Database(tmp_path)  # the server starts all the same
    with pytest.raises(StorageFull):
        await storage.read(lambda file: None)
    monkeypatch.setattr(database, "_open", opened)
    assert await storage.read(lambda file: file.execute("SELECT count(*) FROM big").fetchone()) == (1,)
    storage.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def add(file: sqlite3.Connection) -> None:
    file.execute("INSERT INTO blobs (content) VALUES (randomblob(100000))")


def add_nine(file: sqlite3.Connection) -> None:
    for _ in range(9):
        add(file)


async def until_full(storage: Database) -> int:
    """Add blobs until there is no room, and return how many."""
    await storage.write(lambda file: file.execute("CREATE TABLE blobs (number INTEGER PRIMARY KEY, content BLOB)"))
    for num_blobs in range(1000):
        try:
            await storage.write(add)
        except StorageFull:
            return num_blobs
    raise AssertionError("there was always room")


async def test_a_disk_that_it_has_filled_can_be_emptied_again(small_disk: Path) -> None:
    storage = Database(small_disk)
    num_blobs = await until_full(storage)
    assert num_blobs > 20
    for _ in range(3):  # whatever is tried on the full disk
        with pytest.raises(StorageFull):
            await storage.write(lambda file: file.execute("INSERT INTO blobs (content) VALUES (randomblob(9000000))"))
    for number in range(1, 11):
        await storage.write(partial(_remove, number))
    for _ in range(10):
        await storage.write(add)
    [[count]] = await storage.read(lambda file: file.execute("SELECT count(*) FROM blobs").fetchall())
    assert count == num_blobs
    storage.close()


async def test_a_disk_that_others_have_filled_can_be_emptied_too(small_disk: Path) -> None:
    storage = Database(small_disk)
    await storage.write(lambda file: file.execute("CREATE TABLE blobs (number INTEGER PRIMARY KEY, content BLOB)"))
    for _ in range(20):
        await storage.write(add)
    assert (small_disk / RESERVE_NAME).stat().st_size == RESERVE_BYTES
    with (small_disk / "other").open("wb", buffering=0) as other, suppress(OSError):
        while other.write(bytes(1 << 12)):
            pass
    with suppress(StorageFull):  # that may be how it learns of it
        await storage.write(partial(_remove, 1))
    for number in range(1, 11):
        await storage.write(partial(_remove, number))
    (small_disk / "other").unlink()
    for _ in range(10):
        await storage.write(add)
    with pytest.raises(StorageFull):
        await storage.write(lambda file: file.execute("INSERT INTO blobs (content) VALUES (randomblob(30000000))"))
    assert (small_disk / RESERVE_NAME).stat().st_size == RESERVE_BYTES, "it is taken again when there is room"
    storage.close()


def _remove(number: int, file: sqlite3.Connection) -> None:
    file.execute("DELETE FROM blobs WHERE number = ?", (number,))


async def test_nothing_grows_beyond_the_room_that_its_log_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, own = Database(tmp_path), OwnFile(str(tmp_path / "own.sqlite"))
    for tables in (storage, own):
        await tables.write(lambda file: file.execute("CREATE TABLE blobs (number INTEGER PRIMARY KEY, content BLOB)"))
        for _ in range(20):
            await tables.write(add)
    free = MIN_LOG_BYTES
    monkeypatch.setattr(Room, "_free", lambda room: free)
    for tables, name in ((storage, FILE_NAME), (own, "own.sqlite")):
        log = tmp_path / f"{name}-wal"
        assert log.stat().st_size > 1 << 20
        with pytest.raises(StorageFull):
            await tables.write(add)
        assert log.stat().st_size == 0
        await tables.write(partial(_remove, 1))
        await tables.write(partial(_remove, 2))
        await tables.write(add)  # in their place
        with pytest.raises(StorageFull):
            await tables.write(add_nine)
    assert (tmp_path / RESERVE_NAME).stat().st_size == 0
    free += RESERVE_BYTES
    await storage.write(add_nine)
    storage.close()
    own.close()


async def test_a_database_that_is_always_locked_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_LOCK_SECONDS", 0.05)
    storage = Database(tmp_path)
    with sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageBusy):
            await storage.write(make)
        await storage.read(lambda file: None)  # who reads does not wait
        other.execute("ROLLBACK")
    await storage.write(make)
    storage.close()


async def test_processes_that_open_a_new_database_together_wait_for_each_other(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None, check_same_thread=False) as other:
        other.execute("BEGIN IMMEDIATE")  # as one that turns WAL on: SQLite does not wait for it
        opening = asyncio.create_task(asyncio.to_thread(Database, tmp_path))
        await asyncio.wait([opening], timeout=0.2)
        other.execute("ROLLBACK")
    storage = await opening
    await storage.write(make)
    storage.close()


def test_the_folder_is_its_owners(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "data"
    check_output_files(with_folder(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list(folder.iterdir())
    Database(folder).close()
    assert stat.S_IMODE((folder / FILE_NAME).stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="--data-dir"):
        check_output_files(with_folder(file))
    (tmp_path / FILE_NAME).write_bytes(b"this is no database" * 1000)
    with pytest.raises(ConfigError, match="not a database"):
        Database(tmp_path)
