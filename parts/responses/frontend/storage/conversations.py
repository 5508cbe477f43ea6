"""Conversations and their items, in the tables that all frontends of a launch share (see `responses.py`).

A conversation belongs to its owner, an API key's id: no other key can see it. Each owner has limits of its own for
conversations and bytes, beyond which its least recently used conversations are dropped.
"""

import secrets
import sqlite3
import time
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from penstock.frontend.errors import InvalidParameter, InvalidRequest
from penstock.parts.responses.frontend.storage.own_file import Tables

Item = dict[str, Any]

_item = msgspec.json.Decoder(Item)
_metadata = msgspec.json.Decoder(dict[str, str])


class ConversationNotFound(InvalidRequest, status=404, code="conversation_not_found"):
    """There is no conversation with this id, or it is no longer stored."""


class ItemNotFound(InvalidRequest, status=404, code="item_not_found"):
    """The conversation has no item with this id."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation without its items."""

    id: str
    created_at: int  # Unix seconds
    metadata: dict[str, str]


class ConversationStore:
    """The conversations of one launch, or of all that share a database."""

    def __init__(self, tables: Tables, max_count: int, max_bytes: int) -> None:
        """`max_count` and `max_bytes` apply to each owner; if one is 0, nothing is stored."""
        self._tables = tables
        self._is_on = max_count > 0 and max_bytes > 0
        self._max_count = max_count
        self._max_bytes = max_bytes

    async def create(self, owner: str, metadata: dict[str, str], items: list[Item]) -> Conversation:
        """Make a conversation.

        Raises:
            InvalidParameter: it is too large, or this server stores none.
        """
        made = Conversation(f"conv_{secrets.token_hex(24)}", int(time.time()), metadata)

        def work(file: sqlite3.Connection) -> None:
            encoded = msgspec.json.encode(metadata)
            row = (owner, made.id, len(encoded), made.created_at, encoded)
            file.execute(f"INSERT INTO conversations VALUES (?, ?, {_NOW}, ?, ?, ?)", row)
            self._append(file, owner, made.id, items)

        if not self._is_on:
            raise InvalidParameter("this server stores no conversations (--max-stored-response-bytes 0)")
        await self._tables.write(work)
        return made

    async def get(self, owner: str, conversation_id: str) -> Conversation:
        """Return a conversation.

        Raises:
            ConversationNotFound: there is no such conversation.
        """
        return await self._tables.read(lambda file: _get(file, owner, conversation_id))

    async def num_bytes(self, owner: str, conversation_id: str) -> int:
        """The size of a conversation.

        Raises:
            ConversationNotFound: there is no such conversation.
        """

        def work(file: sqlite3.Connection) -> int:
            _get(file, owner, conversation_id)
            [size] = file.execute(
                "SELECT num_bytes FROM conversations WHERE owner = ? AND id = ?", (owner, conversation_id)
            ).fetchone()
            return int(size)

        return await self._tables.read(work)

    async def update(self, owner: str, conversation_id: str, metadata: dict[str, str]) -> Conversation:
        """Replace a conversation's metadata.

        Raises:
            ConversationNotFound: there is no such conversation.
        """

        def work(file: sqlite3.Connection) -> Conversation:
            file.execute(
                "UPDATE conversations SET metadata = ? WHERE owner = ? AND id = ?",
                (msgspec.json.encode(metadata), owner, conversation_id),
            )
            return _get(file, owner, conversation_id)

        return await self._tables.write(work)

    async def delete(self, owner: str, conversation_id: str) -> None:
        """Delete a conversation, and its items.

        Raises:
            ConversationNotFound: there is no such conversation.
        """

        def work(file: sqlite3.Connection) -> None:
            _get(file, owner, conversation_id)
            _delete(file, owner, conversation_id)

        await self._tables.write(work)

    async def append(self, owner: str, conversation_id: str, items: list[Item]) -> list[Item]:
        """Add items to the end; return them as stored, where an item whose id is taken has a new one.

        Raises:
            ConversationNotFound: there is no such conversation.
            InvalidParameter: the conversation would be too large.
        """

        def work(file: sqlite3.Connection) -> list[Item]:
            _get(file, owner, conversation_id)
            return self._append(file, owner, conversation_id, items)

        return await self._tables.write(work)

    async def items(
        self,
        owner: str,
        conversation_id: str,
        *,
        order: Literal["asc", "desc"] = "asc",
        after: str | None = None,
        limit: int = -1,
    ) -> list[Item]:
        """A conversation's items in this order, after the item `after` if given; at most `limit`, unless that is -1.

        Raises:
            ConversationNotFound: there is no such conversation.
            InvalidParameter: it has no item `after`.
        """

        def work(file: sqlite3.Connection) -> list[Item]:
            _get(file, owner, conversation_id)
            begin = -1 if order == "asc" else 1 << 62
            if after is not None:
                found = _find(file, owner, conversation_id, after)
                if found is None:
                    raise InvalidParameter(
                        f"after: there is no item {after[:128]!r} in this conversation", param="after"
                    )
                begin = found[0]
            rows = file.execute(
                "SELECT item FROM conversation_items WHERE owner = ? AND conversation = ? AND position "
                f"{'>' if order == 'asc' else '<'} ? ORDER BY position {order} LIMIT ?",
                (owner, conversation_id, begin, limit),
            )
            return [_item.decode(item) for (item,) in rows]

        return await self._tables.read(work)

    async def item(self, owner: str, conversation_id: str, item_id: str) -> Item:
        """One item.

        Raises:
            ConversationNotFound, ItemNotFound: there is no such conversation, or no such item in it.
        """

        def work(file: sqlite3.Connection) -> Item:
            _get(file, owner, conversation_id)
            return _one(file, owner, conversation_id, item_id)[1]

        return await self._tables.read(work)

    async def delete_item(self, owner: str, conversation_id: str, item_id: str) -> Conversation:
        """Delete one item; return its conversation.

        Raises:
            ConversationNotFound, ItemNotFound: there is no such conversation, or no such item in it.
        """

        def work(file: sqlite3.Connection) -> Conversation:
            found = _get(file, owner, conversation_id)
            position, item = _one(file, owner, conversation_id, item_id)
            file.execute(
                "DELETE FROM conversation_items WHERE owner = ? AND conversation = ? AND position = ?",
                (owner, conversation_id, position),
            )
            _count(file, owner, conversation_id, -len(msgspec.json.encode(item)))
            return found

        return await self._tables.write(work)

    def _append(self, file: sqlite3.Connection, owner: str, conversation_id: str, items: list[Item]) -> list[Item]:
        [last] = file.execute(
            "SELECT coalesce(max(position), -1) FROM conversation_items WHERE owner = ? AND conversation = ?",
            (owner, conversation_id),
        ).fetchone()
        added, num_bytes = [], 0
        for position, given in enumerate(items, start=last + 1):
            item = given
            if _find(file, owner, conversation_id, item["id"]) is not None:
                item = given | {"id": f"{str(item['id']).partition('_')[0][:8]}_{secrets.token_hex(16)}"}
            encoded = msgspec.json.encode(item)
            row = (owner, conversation_id, position, item["id"], encoded)
            file.execute("INSERT INTO conversation_items VALUES (?, ?, ?, ?, ?)", row)
            num_bytes += len(encoded)
            added.append(item)
        size = _count(file, owner, conversation_id, num_bytes)
        if size > self._max_bytes:
            raise InvalidParameter(
                f"the conversation would have {size} bytes; it may have {self._max_bytes} "
                "(--max-stored-response-bytes)",
                param="items",
            )
        self._drop_oldest(file, owner)
        return added

    def _drop_oldest(self, file: sqlite3.Connection, owner: str) -> None:
        kept_bytes = 0
        newest = file.execute("SELECT id, num_bytes FROM conversations WHERE owner = ? ORDER BY used DESC", (owner,))
        for number, (conversation_id, num_bytes) in enumerate(newest.fetchall(), start=1):
            kept_bytes += num_bytes
            if number > self._max_count or kept_bytes > self._max_bytes:
                _delete(file, owner, conversation_id)


_NOW = "(SELECT coalesce(max(used), 0) + 1 FROM conversations)"
"""A number later than all others, whatever the clocks say."""


def _get(file: sqlite3.Connection, owner: str, conversation_id: str) -> Conversation:
    row = file.execute(
        "SELECT id, created_at, metadata FROM conversations WHERE owner = ? AND id = ?", (owner, conversation_id)
    ).fetchone()
    if row is None:
        raise ConversationNotFound(f"conversation {conversation_id[:128]!r} not found or deleted")
    return Conversation(row[0], row[1], _metadata.decode(row[2]))


def _find(file: sqlite3.Connection, owner: str, conversation_id: str, item_id: str) -> tuple[int, Item] | None:
    row = file.execute(
        "SELECT position, item FROM conversation_items WHERE owner = ? AND conversation = ? AND id = ?",
        (owner, conversation_id, item_id),
    ).fetchone()
    return None if row is None else (row[0], _item.decode(row[1]))


def _one(file: sqlite3.Connection, owner: str, conversation_id: str, item_id: str) -> tuple[int, Item]:
    found = _find(file, owner, conversation_id, item_id)
    if found is None:
        raise ItemNotFound(f"there is no item {item_id[:128]!r} in this conversation")
    return found


def _count(file: sqlite3.Connection, owner: str, conversation_id: str, num_bytes: int) -> int:
    """Add to a conversation's size, and make it the owner's most recently used one; return the new size."""
    [size] = file.execute(
        f"UPDATE conversations SET num_bytes = num_bytes + ?, used = {_NOW} WHERE owner = ? AND id = ? "
        "RETURNING num_bytes",
        (num_bytes, owner, conversation_id),
    ).fetchone()
    return int(size)


def _delete(file: sqlite3.Connection, owner: str, conversation_id: str) -> None:
    file.execute("DELETE FROM conversations WHERE owner = ? AND id = ?", (owner, conversation_id))
    file.execute("DELETE FROM conversation_items WHERE owner = ? AND conversation = ?", (owner, conversation_id))
