"""Responses kept for `previous_response_id`, GET and DELETE: in SQLite tables that all frontends of a launch share.

    put, find, delete ──▶ --data-dir's database, or else a file in the launch's folder

So it does not matter which frontend answers, and no response is lost when a frontend dies. A response belongs to its
owner (`RequestRecord.key_id`, an API key's id): no other key can see it. Each owner has limits of its own for responses
and bytes, beyond which its least recently used responses are dropped.

A background response is stored from its beginning. Its frontend regularly renews its lease (`renew`); if the lease
expires, the response has died with its frontend.
"""

import sqlite3
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from penstock.config import Config
from penstock.frontend.errors import PreviousResponseNotFound, ResponseNotFound, ServerError
from penstock.frontend.json_size import JsonSize, TooManyValuesError
from penstock.ipc.addresses import addresses_in
from penstock.parts.responses.frontend.storage.own_file import IN_MEMORY, Tables

log = structlog.get_logger()

Item = dict[str, Any]

FILE_NAME = "responses.sqlite"

MAX_STORED = 1000
"""Responses of one owner, and as many conversations: more than a client goes back to."""

LEASE_SECONDS = 90.0
"""An unfinished response whose lease was not renewed for this long has died with its frontend."""

_items = msgspec.json.Decoder(list[Item])


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response, and the items of its whole conversation, both as JSON."""

    response: bytes
    items: bytes
    num_values: int  # lists, objects and strings in the items
    num_before: int  # items before its own input
    num_inputs: int
    until: float | None = None  # unfinished: the end of its lease, in Unix seconds

    @property
    def has_died(self) -> bool:
        """Whether the response is unfinished, and will stay so."""
        return self.until is not None and self.until < time.time()

    def conversation(self) -> list[Item]:
        """All items up to and including the response. Their size was checked by `ResponseStore.put`."""
        return _items.decode(self.items)

    def inputs(self) -> list[Item]:
        """The items of the response's own input."""
        return self.conversation()[self.num_before : self.num_before + self.num_inputs]


def store_path(config: Config) -> str:
    """Where this frontend stores responses without --data-dir: in the folder with the launch's sockets.

    A frontend that connects over TCP has no such folder: it stores responses in memory.
    """
    address = addresses_in(config.ipc.frontend_address)[0]
    return str(Path(address.removeprefix("ipc://")).with_name(FILE_NAME)) if address.startswith("ipc://") else IN_MEMORY


class ResponseStore:
    """The responses of one launch, or of all that share a database."""

    def __init__(self, tables: Tables, max_count: int, max_bytes: int) -> None:
        """`max_count` and `max_bytes` apply to each owner; if one is 0, nothing is stored."""
        self._tables = tables
        self.is_on = max_count > 0 and max_bytes > 0
        self._max_count = max_count
        self._max_bytes = max_bytes

    async def put(
        self,
        owner: str,
        response_id: str,
        response: bytes,
        items: list[Item],
        *,
        num_before: int,
        num_inputs: int,
        is_running: bool = False,
        is_known: bool = False,
    ) -> bool:
        """Store a response, dropping its owner's least recently used ones if needed. Too large ones are not stored.

        The first `num_before` items are of earlier responses; `num_inputs` of this one's input follow. `is_running`:
        the response is not finished. `is_known`: it was stored before; if it has been deleted, it is not stored again.
        A full or missing disk is only logged, because the answer does not depend on it. Returns whether it is stored.
        """
        encoded = msgspec.json.encode(items)
        num_bytes = len(response) + len(encoded)
        if num_bytes > self._max_bytes or not self.is_on:
            return False

        def work(file: sqlite3.Connection) -> bool:
            key = (owner, response_id)
            if is_known and not file.execute("SELECT 1 FROM responses WHERE owner = ? AND id = ?", key).fetchone():
                return False
            row = (num_bytes, _num_values(encoded), num_before, num_inputs, response, encoded)
            file.execute(
                "INSERT OR REPLACE INTO responses (owner, id, used, num_bytes, num_values, num_before, num_inputs,"
                f" response, items) VALUES (?, ?, {_NOW}, ?, ?, ?, ?, ?, ?)",
                (owner, response_id, *row),
            )
            file.executemany(
                "INSERT INTO response_items (owner, id, response) VALUES (?, ?, ?)",
                [(owner, item["id"], response_id) for item in items if "id" in item],
            )
            file.execute("DELETE FROM running_responses WHERE owner = ? AND id = ?", key)
            if is_running:
                file.execute("INSERT INTO running_responses VALUES (?, ?, ?)", (*key, time.time() + LEASE_SECONDS))
            _drop_oldest(file, owner, self._max_count, self._max_bytes)
            return True

        try:
            return await self._tables.write(work)
        except (sqlite3.Error, ServerError, TooManyValuesError) as error:  # the last if the output adds too many
            log.error("response not stored", id=response_id, reason=str(error))
            return False

    async def renew(self, owner: str, response_id: str) -> None:
        """Renew an unfinished response's lease. A failure is only logged: there is time for another try."""
        until = time.time() + LEASE_SECONDS
        try:
            await self._tables.write(
                lambda file: file.execute(
                    "UPDATE running_responses SET until = ? WHERE owner = ? AND id = ?", (until, owner, response_id)
                )
            )
        except (sqlite3.Error, ServerError) as error:
            log.warning("response lease not renewed", id=response_id, reason=str(error))

    async def get(self, owner: str, response_id: str) -> StoredResponse:
        """Return a response, and make it its owner's most recently used one.

        Raises:
            ResponseNotFound: if it is not, or no longer, stored.
        """
        found = await self._get(owner, response_id)
        if found is None:
            raise ResponseNotFound(_not_here(response_id), param="response_id")
        return found

    async def previous(self, owner: str, response_id: str) -> StoredResponse:
        """Return a response that another one continues.

        Raises:
            PreviousResponseNotFound: if it is not, or no longer, stored.
        """
        found = await self._get(owner, response_id)
        if found is None:
            raise PreviousResponseNotFound(_not_here(response_id), param="previous_response_id")
        return found

    async def _get(self, owner: str, response_id: str) -> StoredResponse | None:
        key = (owner, response_id)

        def look(file: sqlite3.Connection) -> StoredResponse | None:
            row = file.execute(
                "SELECT response, items, num_values, num_before, num_inputs, until FROM responses "
                "LEFT JOIN running_responses USING (owner, id) WHERE owner = ? AND id = ?",
                key,
            ).fetchone()
            return None if row is None else StoredResponse(*row)

        def use(file: sqlite3.Connection) -> StoredResponse | None:
            file.execute(f"UPDATE responses SET used = {_NOW} WHERE owner = ? AND id = ?", key)
            return look(file)

        try:
            return await self._tables.write(use)
        except (sqlite3.Error, ServerError) as error:  # only its time of use is not recorded
            log.warning("response use not recorded", reason=str(error))
            return await self._tables.read(look)

    async def items(self, owner: str, item_ids: list[str]) -> dict[str, bytes]:
        """Items of the owner's stored responses and conversations by id, as JSON; those not found are left out.

        Each read is short, so that what others want of the database is done in between. SQLite finds the items in their
        response's JSON: decoding all of it here would keep the event loop waiting for this thread.
        """
        found: dict[str, bytes] = {}
        wanted = set(item_ids)
        for item_id in item_ids:
            if item_id in wanted:
                usable = await self._tables.read(partial(_items_near, owner, item_id, msgspec.json.encode([*wanted])))
                found.update(usable)
                wanted -= {item_id, *(each for each, _ in usable)}
        return found

    async def delete(self, owner: str, response_id: str) -> None:
        """Delete a response.

        Raises:
            ResponseNotFound: if it is not, or no longer, stored.
        """

        def work(file: sqlite3.Connection) -> int:
            key = (owner, response_id)
            file.execute("DELETE FROM running_responses WHERE owner = ? AND id = ?", key)
            return file.execute("DELETE FROM responses WHERE owner = ? AND id = ?", key).rowcount

        if not await self._tables.write(work):
            raise ResponseNotFound(_not_here(response_id), param="response_id")


_NOW = "(SELECT coalesce(max(used), 0) + 1 FROM responses)"
"""A number later than all others, whatever the clocks say."""


def _drop_oldest(file: sqlite3.Connection, owner: str, max_count: int, max_bytes: int) -> None:
    kept_bytes = 0
    newest = file.execute("SELECT used, num_bytes FROM responses WHERE owner = ? ORDER BY used DESC", (owner,))
    for number, (used, num_bytes) in enumerate(newest.fetchall(), start=1):
        kept_bytes += num_bytes
        if number > max_count or kept_bytes > max_bytes:
            file.execute("DELETE FROM responses WHERE owner = ? AND used <= ?", (owner, used))
            return


def _items_near(owner: str, item_id: str, wanted: bytes, file: sqlite3.Connection) -> list[tuple[str, bytes]]:
    """The wanted items of the response that was stored last with this one; else it alone of a conversation, if there.

    `wanted` is a JSON list of ids. An item whose id is not among them, or no text, is left out.
    """
    key = {"owner": owner, "item": item_id, "wanted": wanted.decode()}
    rows = file.execute(
        "SELECT json_extract(item.value, '$.id') AS item_id, CAST(item.value AS BLOB) FROM responses, "
        "json_each(CAST(items AS TEXT)) AS item WHERE owner = :owner AND responses.id = (SELECT response "
        "FROM response_items WHERE owner = :owner AND id = :item ORDER BY number DESC LIMIT 1) "
        "AND item_id IN (SELECT value FROM json_each(:wanted))",
        key,
    ).fetchall()
    if rows:
        return rows
    return file.execute(
        "SELECT id, CAST(item AS BLOB) FROM conversation_items WHERE owner = :owner AND id = :item "
        "ORDER BY rowid DESC LIMIT 1",
        key,
    ).fetchall()


def _num_values(text: bytes) -> int:
    size = JsonSize()
    size.feed_all(text)
    return size.num_values


def _not_here(response_id: str) -> str:
    return f"response {response_id[:128]!r} not found or deleted"
