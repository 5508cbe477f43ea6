"""GET and DELETE /v1/responses/{id}, GET /v1/responses/{id}/input_items"""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from penstock.frontend.api.service import Service
from penstock.frontend.errors import InvalidParameter
from penstock.frontend.exchange import sse
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.responses.builder import Event
from penstock.frontend.responses.course import EventWriter
from penstock.frontend.schema_responses import DeletedResponse, InputItems

MAX_PAGE = 100
_PAGE = 20
_NO_EVENTS = -1


async def retrieve_response(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """A stored response, whole or as the stream that told of it (each text in one piece).

    Raises:
        ResponseNotFound: if it is not stored here.
        InvalidParameter: if the query asks for what is none.
    """
    is_stream = record.query.get("stream", "false").lower()
    if is_stream not in ("false", "0", "true", "1"):
        raise InvalidParameter("stream must be true or false", param="stream")
    after = _number(record, "starting_after", _NO_EVENTS, 0, 1 << 31)
    stored = await service.responses.get(record.key_id, record.argument)
    if is_stream in ("false", "0"):
        return Reply(stored.response)
    events = EventWriter().write(_events(msgspec.json.decode(stored.response)), after)
    return StreamReply(_once(events), close=lambda: None, headers=sse.HEADERS)


async def list_input_items(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """The items of a stored response's own input, a page of them.

    Raises:
        ResponseNotFound: if the response is not stored here.
        InvalidParameter: if the query asks for what is none.
    """
    limit = _number(record, "limit", _PAGE, 1, MAX_PAGE)
    order = record.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidParameter("order must be 'asc' or 'desc'", param="order")
    stored = await service.responses.get(record.key_id, record.argument)
    items = stored.inputs()
    if order == "desc":
        items.reverse()
    after = record.query.get("after")
    if after is not None:
        begin = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if begin is None:
            raise InvalidParameter(f"after: there is no item {after[:128]!r} in this response's input", param="after")
        items = items[begin + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return Reply(msgspec.json.encode(InputItems(page, first, last, len(items) > limit)))


async def delete_response(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """Forget a stored response.

    Raises:
        ResponseNotFound: if it is not stored here.
    """
    response_id = record.argument
    await service.responses.delete(record.key_id, response_id)
    return Reply(msgspec.json.encode(DeletedResponse(response_id)))


def _number(record: RequestRecord, name: str, default: int, low: int, high: int) -> int:
    given = record.query.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 20 and low <= int(given) <= high):
        raise InvalidParameter(f"{name} must be between {low} and {high}, got {given[:32]!r}", param=name)
    return int(given)


async def _once(events: bytes) -> AsyncGenerator[bytes, None]:
    yield events


def _events(response: dict[str, Any]) -> list[Event]:
    """The events of a stream that would have told of this response."""
    begun = response | {"status": "in_progress", "completed_at": None, "output": [], "usage": None}
    begun["incomplete_details"] = None
    events: list[Event] = [(f"response.{kind}", {"response": begun}) for kind in ("created", "in_progress")]
    for index, item in enumerate(response["output"]):
        events += _item_events(index, item)
    return [*events, (f"response.{response['status']}", {"response": response})]


def _item_events(index: int, item: dict[str, Any]) -> list[Event]:
    place = {"output_index": index, "item_id": item["id"]}
    is_call = item["type"] == "function_call"
    nothing: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
    new = item | {"status": "in_progress"} | nothing
    events: list[Event] = [("response.output_item.added", {"output_index": index, "item": new})]
    if is_call:
        name = "response.function_call_arguments"
        events.append((f"{name}.delta", {**place, "delta": item["arguments"]}))
        events.append((f"{name}.done", {**place, "name": item["name"], "arguments": item["arguments"]}))
    for part_index, part in enumerate(item.get("content", ())):
        at = {**place, "content_index": part_index}
        name = f"response.{part['type']}"
        more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        empty = part | {"text": ""} | dict.fromkeys(more, ())
        events += [
            ("response.content_part.added", {**at, "part": empty}),
            (f"{name}.delta", {**at, "delta": part["text"], **more}),
            (f"{name}.done", {**at, "text": part["text"], **more}),
            ("response.content_part.done", {**at, "part": part}),
        ]
    return [*events, ("response.output_item.done", {"output_index": index, "item": item})]
