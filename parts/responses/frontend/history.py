"""What a request continues from: a response, a conversation, single items.

All of these are stored here, so a small request may bring much along. Together they may be no larger than a body, as
if the client had sent them.
"""

import msgspec

from penstock.frontend.api.service import Service
from penstock.frontend.errors import ContextLengthExceeded, InvalidParameter, PreviousResponseNotFound
from penstock.frontend.exchange.replies import RequestRecord
from penstock.frontend.heavy_turns import heavy_turn
from penstock.frontend.validation.common import without_collecting
from penstock.parts.responses.frontend.items import references, resolved
from penstock.parts.responses.frontend.part import stored_by
from penstock.parts.responses.frontend.schema import ResponsesRequest
from penstock.parts.responses.frontend.tool_items import Item
from penstock.parts.responses.frontend.validate import conversation_id

_item = msgspec.json.Decoder(Item)


async def earlier_items(
    service: Service, record: RequestRecord, request: ResponsesRequest, num_bytes: int
) -> tuple[list[Item], int]:
    """The items before the input of a request of `num_bytes`, and their size in bytes.

    Raises:
        InvalidRequest: they are not stored here, or too large.
    """
    before, conversation = request.previous_response_id, conversation_id(request)
    if before and conversation:
        raise InvalidParameter("conversation and previous_response_id exclude each other", param="conversation")
    if conversation:
        size = await stored_by(service).conversations.num_bytes(record.key_id, conversation)
        _check_size(service, size, num_bytes, "conversation")
        return await stored_by(service).conversations.items(record.key_id, conversation), size
    if not before:
        return [], 0
    stored = await stored_by(service).responses.previous(record.key_id, before)
    if stored.until is not None:
        raise PreviousResponseNotFound(f"the response {before!r} is not finished", param="previous_response_id")
    size = len(stored.items)
    _check_size(service, size, num_bytes, "previous_response_id")
    await heavy_turn(size)
    with without_collecting():
        return stored.conversation(), size


async def with_references(
    service: Service, record: RequestRecord, given: list[Item], num_before: int, num_bytes: int
) -> list[Item]:
    """The given items of a request of `num_bytes`, where stored items replace references to them.

    `num_before` is the size of the items before them, in bytes.

    Raises:
        InvalidRequest: there are too many references, or items that are not stored here, or too large.
    """
    item_ids = references(given)
    if not item_ids:
        return given
    known = await stored_by(service).responses.items(record.key_id, item_ids)
    num_known = sum(len(known[item_id]) for item_id in item_ids if item_id in known)
    _check_size(service, num_before + num_known, num_bytes, "input")
    await heavy_turn(num_known)
    with without_collecting():
        decoded = {item_id: _item.decode(text) for item_id, text in known.items()}
        return resolved(given, decoded)


def _check_size(service: Service, num_stored: int, num_bytes: int, param: str) -> None:
    if num_stored + num_bytes > service.max_body_bytes:
        raise ContextLengthExceeded(
            f"the conversation has {num_stored} bytes, and this request {num_bytes}; "
            f"together they may have {service.max_body_bytes}",
            param=param,
        )
