"""Batches in the database: their facts, their counts, and the answers to their lines until they end.

A runner that has lost its lease may not know it yet, so everything may be written twice. Therefore only a line's first
answer counts, and a state changes only from the states that allow it.
"""

import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from penstock.frontend.errors import InvalidParameter, InvalidRequest
from penstock.frontend.storage.database import Database
from penstock.parts.batches.frontend.shapes import Batch, RequestCounts, Status

MAX_LIVE = 100
"""Limit for the unfinished batches of one owner."""

_batch = msgspec.json.Decoder(Batch)
_FIELDS = "facts, num_lines, num_completed, num_failed"
_ENDS = ("completed", "failed", "expired", "cancelled")


class BatchNotFound(InvalidRequest, status=404, code="batch_not_found"):
    """There is no batch with this id, or it is another key's."""


class BatchIsOver(InvalidRequest, status=409, code="batch_is_over"):
    """A batch that has ended cannot be cancelled."""


class LiveBatch(NamedTuple):
    """An unfinished batch, and its owner."""

    number: int
    owner: str
    tenant: str
    batch: Batch


class BatchStore:
    """The batches of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, owner: str, tenant: str, batch: Batch) -> None:
        """Add a batch, which waits for a runner.

        Raises:
            InvalidRequest: its input file is gone, or its owner has too many batches.
        """

        def work(file: sqlite3.Connection) -> None:
            [count] = file.execute("SELECT count(*) FROM batches WHERE owner = ? AND is_live", (owner,)).fetchone()
            if count >= MAX_LIVE:
                raise InvalidRequest(f"{count} batches of this key are not finished; at most {MAX_LIVE} may be")
            key = (batch.input_file_id, owner)
            if file.execute("SELECT 1 FROM files WHERE id = ? AND owner = ?", key).fetchone() is None:
                raise InvalidParameter("input_file_id: the file was deleted", param="input_file_id")
            file.execute(
                "INSERT INTO batches (id, owner, tenant, input_file_id, is_live, facts) VALUES (?, ?, ?, ?, 1, ?)",
                (batch.id, owner, tenant, batch.input_file_id, msgspec.json.encode(batch).decode()),
            )

        await self._database.write(work)

    async def get(self, owner: str, batch_id: str) -> Batch:
        """A batch as it is now.

        Raises:
            BatchNotFound: it is not there.
        """
        row = await self._database.read(
            lambda file: file.execute(
                f"SELECT {_FIELDS} FROM batches WHERE owner = ? AND id = ?", (owner, batch_id)
            ).fetchone()
        )
        if row is None:
            raise _not_found(batch_id)
        return _shown(row)

    async def page(self, owner: str, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """Batches of an owner, the newest first, after the batch `after`; and whether there are more.

        Raises:
            InvalidParameter: there is no batch `after`.
        """

        def work(file: sqlite3.Connection) -> list[tuple[Any, ...]]:
            before = 1 << 62
            if after is not None:
                key = (owner, after)
                found = file.execute("SELECT number FROM batches WHERE owner = ? AND id = ?", key).fetchone()
                if found is None:
                    raise InvalidParameter(f"after: there is no batch {after[:128]!r}", param="after")
                [before] = found
            return file.execute(
                f"SELECT {_FIELDS} FROM batches WHERE owner = ? AND number < ? ORDER BY number DESC LIMIT ?",
                (owner, before, limit + 1),
            ).fetchall()

        rows = await self._database.read(work)
        return [_shown(row) for row in rows[:limit]], len(rows) > limit

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Ask for a batch's end; one that is already ending does not change.

        Raises:
            BatchNotFound: there is no such batch.
            BatchIsOver: the batch has ended.
        """

        def work(file: sqlite3.Connection) -> Batch:
            key = (owner, batch_id)
            row = file.execute(f"SELECT number, {_FIELDS} FROM batches WHERE owner = ? AND id = ?", key).fetchone()
            if row is None:
                raise _not_found(batch_id)
            batch = _shown(row[1:])
            if batch.status in _ENDS:
                raise BatchIsOver(f"{batch_id} is {batch.status}: it cannot be cancelled any more")
            if batch.status in ("validating", "in_progress"):
                batch = replace(batch, status="cancelling", cancelling_at=int(time.time()))
                _write(file, row[0], batch)
            return batch

        return await self._database.write(work)

    async def live(self) -> list[LiveBatch]:
        """All batches that are not finished, the oldest first."""
        rows = await self._database.read(
            lambda file: file.execute(
                f"SELECT number, owner, tenant, {_FIELDS} FROM batches WHERE is_live ORDER BY number"
            ).fetchall()
        )
        return [LiveBatch(number, owner, tenant, _shown(facts)) for number, owner, tenant, *facts in rows]

    async def change(
        self,
        number: int,
        before: Collection[Status],
        to: Status,
        *,
        num_lines: int | None = None,
        also: Callable[[sqlite3.Connection], dict[str, Any]] = lambda file: {},
        **facts: Any,
    ) -> bool:
        """Change a batch's state from one of `before` to `to`; False if it is in none of them.

        `also` is called in the same transaction, and returns more facts.
        """

        def work(file: sqlite3.Connection) -> bool:
            row = file.execute(f"SELECT {_FIELDS} FROM batches WHERE number = ?", (number,)).fetchone()
            batch = _shown(row)
            if batch.status not in before:
                return False
            if num_lines is not None:
                file.execute("UPDATE batches SET num_lines = ? WHERE number = ?", (num_lines, number))
            stamp = {f"{to}_at": int(time.time())}
            _write(file, number, replace(batch, status=to, **stamp, **facts, **also(file)))
            if to in _ENDS:
                file.execute("DELETE FROM answers WHERE batch = ?", (number,))
            return True

        return await self._database.write(work)

    async def put(self, number: int, line: int, content: bytes, *, is_error: bool) -> None:
        """Keep the answer to a line; the first one counts."""

        def work(file: sqlite3.Connection) -> None:
            added = file.execute(
                "INSERT OR IGNORE INTO answers SELECT ?, ?, ?, ? WHERE EXISTS "
                "(SELECT 1 FROM batches WHERE number = ? AND is_live)",
                (number, line, is_error, content, number),
            )
            if added.rowcount > 0:
                counter = "num_failed" if is_error else "num_completed"
                file.execute(f"UPDATE batches SET {counter} = {counter} + 1 WHERE number = ?", (number,))

        await self._database.write(work)

    async def answered(self, number: int) -> set[int]:
        """The numbers of the lines that have an answer."""
        return await self._database.read(
            lambda file: {line for (line,) in file.execute("SELECT line FROM answers WHERE batch = ?", (number,))}
        )

    async def answers(self, number: int, after: int, *, are_errors: bool) -> list[tuple[int, bytes]]:
        """Some answers to the lines after `after`, in order; empty if there are no more."""
        return await self._database.read(
            lambda file: file.execute(
                "SELECT line, content FROM answers WHERE batch = ? AND line > ? AND is_error = ? "
                "ORDER BY line LIMIT 64",
                (number, after, are_errors),
            ).fetchall()
        )


def _write(file: sqlite3.Connection, number: int, batch: Batch) -> None:
    file.execute(
        "UPDATE batches SET facts = ?, is_live = ? WHERE number = ?",
        (msgspec.json.encode(batch).decode(), batch.status not in _ENDS, number),
    )


def _shown(row: Sequence[Any]) -> Batch:
    facts, *counts = row
    return replace(_batch.decode(facts), request_counts=RequestCounts(*counts))


def _not_found(batch_id: str) -> BatchNotFound:
    return BatchNotFound(f"there is no batch {batch_id[:128]!r} here", param="batch_id")
