"""Responses kept for `previous_response_id`, GET and DELETE: a SQLite file that all frontends of a launch share.

    put, find, delete ──▶ its own thread ──▶ the file: in the launch's folder, or --response-store

So it does not matter which frontend answers, and no response is lost when a frontend dies. A response belongs to its
owner (`RequestRecord.key_id`, an API key's id): nobody else can see it. Each owner has its own limits of responses and
bytes, beyond which its least recently used ones are dropped.
"""

import asyncio
import errno
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from penstock.core.config import Config, ConfigError
from penstock.frontend.errors import PreviousResponseNotFound, ResponseNotFound
from penstock.frontend.json_size import JsonSize, TooManyValuesError

log = structlog.get_logger()

T = TypeVar("T")

Item = dict[str, Any]

IN_MEMORY = ":memory:"
FILE_NAME = "responses.sqlite"

_LOCK_SECONDS = 10.0
"""How long a write waits for other frontends' writes; each takes milliseconds."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    owner TEXT NOT NULL, id TEXT NOT NULL, used INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
    num_values INTEGER NOT NULL, num_before INTEGER NOT NULL, num_inputs INTEGER NOT NULL,
    response BLOB NOT NULL, items BLOB NOT NULL,
    PRIMARY KEY (owner, id)
);
CREATE INDEX IF NOT EXISTS by_use ON responses (owner, used, num_bytes);
"""

_items = msgspec.json.Decoder(list[Item])


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response, and the items of its whole conversation, both as JSON."""

    response: bytes
    items: bytes
    num_values: int  # lists, objects and strings in the items
    num_before: int  # items before its own input
    num_inputs: int

    def conversation(self) -> list[Item]:
        """All items up to and including the response. Their size was checked by `ResponseStore.put`."""
        return _items.decode(self.items)

    def inputs(self) -> list[Item]:
        """The items of its own input."""
        return self.conversation()[self.num_before : self.num_before + self.num_inputs]


def store_path(config: Config) -> str:
    """Where this frontend stores responses: --response-store, or else the folder with the launch's sockets.

    A frontend that connects by TCP has no such folder: it stores responses in memory.
    """
    if config.frontend.response_store:
        return config.frontend.response_store
    address = config.ipc.frontend_address
    return str(Path(address.removeprefix("ipc://")).with_name(FILE_NAME)) if address.startswith("ipc://") else IN_MEMORY


class ResponseStore:
    """The responses of one launch; lives in a running event loop until `close`."""

    def __init__(self, path: str, max_count: int, max_bytes: int) -> None:
        """`max_count` and `max_bytes` apply to each owner; if one is 0, nothing is stored.

        If the disk is full, a restarted frontend continues with an empty store in memory.

        Raises:
            ConfigError: if the file cannot be used.
        """
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, "penstock-responses")
        try:
            self._file = self._thread.submit(_open, path).result()
        except (sqlite3.Error, OSError) as error:
            if not _is_disk_full(error):
                self._thread.shutdown()
                raise ConfigError(f"--response-store: {path!r} cannot be used: {error}") from None
            log.error("responses are stored in memory: the disk is full", file=path, reason=str(error))
            self._file = self._thread.submit(_open, IN_MEMORY).result()

    async def put(
        self, owner: str, response_id: str, response: bytes, items: list[Item], *, num_before: int, num_inputs: int
    ) -> None:
        """Store a response, dropping its owner's least recently used ones if needed. Too large ones are not stored.

        The first `num_before` items are those of earlier responses, then come `num_inputs` of this one's input.
        A full or missing disk is only logged: the answer itself does not depend on it.
        """
        encoded = msgspec.json.encode(items)
        num_bytes = len(response) + len(encoded)
        if num_bytes > self._max_bytes or self._max_count == 0:
            return

        def work() -> None:
            row = (num_bytes, _num_values(encoded), num_before, num_inputs, response, encoded)
            with self._file:
                self._file.execute(
                    "INSERT OR REPLACE INTO responses (owner, id, used, num_bytes, num_values, num_before, num_inputs,"
                    f" response, items) VALUES (?, ?, {_NOW}, ?, ?, ?, ?, ?, ?)",
                    (owner, response_id, *row),
                )
                self._drop_oldest(owner)

        try:
            await self._do(work)
        except (sqlite3.Error, TooManyValuesError) as error:  # the latter if the output adds too many
            log.error("a response is not stored", id=response_id, reason=str(error))

    def _drop_oldest(self, owner: str) -> None:
        kept_bytes = 0
        newest = self._file.execute(
            "SELECT used, num_bytes FROM responses WHERE owner = ? ORDER BY used DESC", (owner,)
        )
        for number, (used, num_bytes) in enumerate(newest.fetchall(), start=1):
            kept_bytes += num_bytes
            if number > self._max_count or kept_bytes > self._max_bytes:
                self._file.execute("DELETE FROM responses WHERE owner = ? AND used <= ?", (owner, used))
                return

    async def get(self, owner: str, response_id: str) -> StoredResponse:
        """Return a response, and make it its owner's most recently used one.

        Raises:
            ResponseNotFound: if it is not, or no longer, stored.
        """
        found = await self._do(lambda: self._get(owner, response_id))
        if found is None:
            raise ResponseNotFound(_not_here(response_id), param="response_id")
        return found

    async def previous(self, owner: str, response_id: str) -> StoredResponse:
        """Return a response that another one continues.

        Raises:
            PreviousResponseNotFound: if it is not, or no longer, stored.
        """
        found = await self._do(lambda: self._get(owner, response_id))
        if found is None:
            raise PreviousResponseNotFound(_not_here(response_id), param="previous_response_id")
        return found

    def _get(self, owner: str, response_id: str) -> StoredResponse | None:
        key = (owner, response_id)
        fields = "response, items, num_values, num_before, num_inputs"
        row = self._file.execute(f"SELECT {fields} FROM responses WHERE owner = ? AND id = ?", key).fetchone()
        if row is None:
            return None
        try:
            with self._file:
                self._file.execute(f"UPDATE responses SET used = {_NOW} WHERE owner = ? AND id = ?", key)
        except sqlite3.Error as error:  # the response is found all the same
            log.warning("a response's use could not be recorded", reason=str(error))
        return StoredResponse(*row)

    async def items(self, owner: str, item_ids: list[str]) -> dict[str, Item]:
        """Items of the owner's stored conversations, by id; those not found are left out."""

        def work() -> dict[str, Item]:
            found: dict[str, Item] = {}
            for item_id in item_ids:
                if item_id in found:
                    continue
                row = self._file.execute(
                    "SELECT items FROM responses WHERE owner = ? AND instr(items, ?) ORDER BY used DESC LIMIT 1",
                    (owner, f'"id":"{item_id}"'.encode()),
                ).fetchone()
                if row is not None:
                    found |= {item["id"]: item for item in _items.decode(row[0]) if item.get("id") in wanted}
            return found

        wanted = set(item_ids)
        return await self._do(work)

    async def delete(self, owner: str, response_id: str) -> None:
        """Delete a response.

        Raises:
            ResponseNotFound: if it is not, or no longer, stored.
        """

        def work() -> int:
            with self._file:
                key = (owner, response_id)
                return self._file.execute("DELETE FROM responses WHERE owner = ? AND id = ?", key).rowcount

        if not await self._do(work):
            raise ResponseNotFound(_not_here(response_id), param="response_id")

    def close(self) -> None:
        """Close the file; its content stays."""
        self._thread.shutdown()
        self._file.close()

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


_NOW = "(SELECT coalesce(max(used), 0) + 1 FROM responses)"
"""Later than all others, whatever the clocks say."""


def _open(path: str) -> sqlite3.Connection:
    if path != IN_MEMORY:
        Path(path).touch(mode=0o600)
    file = sqlite3.connect(path, timeout=_LOCK_SECONDS, check_same_thread=False)  # another thread closes it
    file.execute("PRAGMA journal_mode = WAL")
    file.execute("PRAGMA synchronous = OFF")  # a crash of the machine may lose responses, one of a process does not
    file.executescript(_SCHEMA)
    return file


def _is_disk_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    code = getattr(error, "sqlite_errorcode", 0)
    return code == sqlite3.SQLITE_FULL or code & 0xFF == sqlite3.SQLITE_IOERR


def _num_values(text: bytes) -> int:
    size = JsonSize()
    size.feed_all(text)
    return size.num_values


def _not_here(response_id: str) -> str:
    return f"there is no response {response_id[:128]!r} here (any more)"
