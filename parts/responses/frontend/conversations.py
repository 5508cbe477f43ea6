"""/v1/conversations: items that responses continue from and add to, kept until they are deleted."""

from typing import Any

import msgspec

from penstock.frontend.api.body import read
from penstock.frontend.api.service import Service
from penstock.frontend.errors import InvalidParameter, TooManyValues
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.frontend.json_size import JsonSize, TooManyValuesError
from penstock.parts.responses.frontend.history import with_references
from penstock.parts.responses.frontend.items import as_messages, known_items
from penstock.parts.responses.frontend.part import stored_by
from penstock.parts.responses.frontend.schema import InputItems
from penstock.parts.responses.frontend.storage.conversations import Conversation
from penstock.parts.responses.frontend.stored import MAX_PAGE, PAGE, number_in, order_in
from penstock.parts.responses.frontend.tool_items import Item
from penstock.parts.responses.frontend.validate import valid_metadata

MAX_ADDED = 20
"""OpenAI's limit for the items of one request."""


class ConversationRequest(msgspec.Struct, kw_only=True):
    """POST /v1/conversations"""

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class MetadataRequest(msgspec.Struct, kw_only=True):
    """POST /v1/conversations/{id}"""

    metadata: dict[str, str] | None


class ItemsRequest(msgspec.Struct, kw_only=True):
    """POST /v1/conversations/{id}/items"""

    items: list[dict[str, Any]]


class ConversationAnswer(msgspec.Struct, frozen=True):
    """A conversation without its items."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: str = "conversation"


class DeletedConversation(msgspec.Struct, frozen=True):
    id: str
    object: str = "conversation.deleted"
    deleted: bool = True


_created = msgspec.json.Decoder(ConversationRequest)
_updated = msgspec.json.Decoder(MetadataRequest)
_added = msgspec.json.Decoder(ItemsRequest)


async def create_conversation(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """Make a conversation, perhaps with its first items.

    Raises:
        InvalidRequest: one of its kinds (see `errors.py`).
    """
    asked = await read(_created, record, body)
    items = await _items(service, record, asked.items or [], len(body))
    return _shown(await stored_by(service).conversations.create(record.key_id, valid_metadata(asked.metadata), items))


async def show_conversation(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """One conversation.

    Raises:
        ConversationNotFound: there is no such conversation.
    """
    return _shown(await stored_by(service).conversations.get(record.key_id, record.argument))


async def update_conversation(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """Replace a conversation's metadata.

    Raises:
        InvalidRequest: one of its kinds (see `errors.py`).
    """
    metadata = valid_metadata((await read(_updated, record, body)).metadata)
    return _shown(await stored_by(service).conversations.update(record.key_id, record.argument, metadata))


async def delete_conversation(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """Delete a conversation and its items. Responses that belong to it stay.

    Raises:
        ConversationNotFound: there is no such conversation.
    """
    await stored_by(service).conversations.delete(record.key_id, record.argument)
    return Reply(msgspec.json.encode(DeletedConversation(record.argument)))


async def add_items(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """Add items to a conversation's end.

    Raises:
        InvalidRequest: one of its kinds (see `errors.py`).
    """
    asked = await read(_added, record, body)
    items = await _items(service, record, asked.items, len(body))
    return _page(await stored_by(service).conversations.append(record.key_id, record.argument, items), has_more=False)


async def list_items(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """A page of a conversation's items.

    Raises:
        InvalidRequest: one of its kinds (see `errors.py`).
    """
    limit = number_in(record, "limit", PAGE, 1, MAX_PAGE)
    after = record.query.get("after")
    order = order_in(record)
    stored = stored_by(service).conversations
    items = await stored.items(record.key_id, record.argument, order=order, after=after, limit=limit + 1)
    return _page(items[:limit], has_more=len(items) > limit)


async def show_item(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """One item of a conversation.

    Raises:
        ConversationNotFound, ItemNotFound: there is no such conversation, or no such item in it.
    """
    item = await stored_by(service).conversations.item(record.key_id, record.argument, record.item)
    return Reply(msgspec.json.encode(item))


async def delete_item(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """Delete one item; answer with the conversation.

    Raises:
        ConversationNotFound, ItemNotFound: there is no such conversation, or no such item in it.
    """
    return _shown(await stored_by(service).conversations.delete_item(record.key_id, record.argument, record.item))


async def _items(service: Service, record: RequestRecord, given: list[Item], num_bytes: int) -> list[Item]:
    """The items of a request of `num_bytes`, in the form in which they are kept."""
    if len(given) > MAX_ADDED:
        raise InvalidParameter(f"items may hold {MAX_ADDED} items at most, got {len(given)}", param="items")
    given = await with_references(service, record, given, 0, num_bytes)
    as_messages(given, None, takes_images=service.image_limits is not None, warnings=record.warnings)
    items = known_items(given)
    try:
        JsonSize().feed_all(msgspec.json.encode(items))
    except TooManyValuesError as error:
        raise TooManyValues(f"the items cannot be stored: {error}", param="items") from None
    return items


def _shown(conversation: Conversation) -> Reply:
    answer = ConversationAnswer(conversation.id, conversation.created_at, conversation.metadata)
    return Reply(msgspec.json.encode(answer))


def _page(items: list[Item], *, has_more: bool) -> Reply:
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return Reply(msgspec.json.encode(InputItems(items, first, last, has_more)))
