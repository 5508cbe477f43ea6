"""GET and DELETE /v1/responses/{id}, POST /v1/responses/{id}/cancel, GET /v1/responses/{id}/input_items"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, Literal

import msgspec

from penstock.frontend.api.service import Service
from penstock.frontend.api.streams import continued, position, stopped
from penstock.frontend.errors import InvalidParameter, InvalidRequest
from penstock.frontend.exchange import sse
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.parts.responses.frontend.builder import Event
from penstock.parts.responses.frontend.part import stored_by
from penstock.parts.responses.frontend.response_writer import EventWriter
from penstock.parts.responses.frontend.schema import DeletedResponse, InputItems
from penstock.parts.responses.frontend.storage.responses import StoredResponse

MAX_PAGE = 100
PAGE = 20
_NO_EVENTS = -1
_CANCEL_SECONDS = 5.0
_CANCEL_LOOKS = 50


async def retrieve_response(service: Service, record: RequestRecord, body: bytes) -> Reply | StreamReply:
    """A stored response, as JSON or as the stream of its events (each text in one piece).

    Raises:
        ResponseNotFound: if it is not stored here.
        InvalidParameter: if the query is not valid.
    """
    is_stream = record.query.get("stream", "false").lower()
    if is_stream not in ("false", "0", "true", "1"):
        raise InvalidParameter("stream must be true or false", param="stream")
    after = position(record)
    stored = await _current(service, record)
    if is_stream in ("false", "0"):
        return Reply(stored.response)
    response = msgspec.json.decode(stored.response)
    if response["background"]:
        live = await continued(service, record.key_id, record.argument, after)
        if live is not None:
            return live
    events = EventWriter().write(_events(response), after)
    if response["background"] and after != _NO_EVENTS:  # the pieces in which its texts came are no longer known
        kind = f"response.{response['status']}"
        data = {"type": kind, "sequence_number": after + 1, "response": response}
        events = sse.named_event(kind, msgspec.json.encode(data))
    return StreamReply(_once(events), close=lambda: None, headers=sse.HEADERS)


async def cancel_response(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """Cancel a background response; answer with the response. One that has ended does not change.

    Raises:
        ResponseNotFound: if it is not stored here.
        InvalidRequest: if it is not a background response.
    """
    stored = await _current(service, record)
    if not msgspec.json.decode(stored.response)["background"]:
        raise InvalidRequest("only responses in the background can be cancelled")
    if stored.until is not None:
        await stopped(service, record.key_id, record.argument)
        for _ in range(_CANCEL_LOOKS):  # wait until its frontend has ended and stored it
            await asyncio.sleep(_CANCEL_SECONDS / _CANCEL_LOOKS)
            stored = await stored_by(service).responses.get(record.key_id, record.argument)
            if stored.until is None:
                break
        else:
            stored = await _ended(service, record, stored, {"status": "cancelled"})
    return Reply(stored.response)


async def _current(service: Service, record: RequestRecord) -> StoredResponse:
    """The stored response; it has failed if the frontend that computed it has died."""
    stored = await stored_by(service).responses.get(record.key_id, record.argument)
    if not stored.has_died:
        return stored
    error = {"code": "server_error", "message": "the server process that computed the response has ended"}
    return await _ended(service, record, stored, {"status": "failed", "error": error})


async def _ended(
    service: Service, record: RequestRecord, stored: StoredResponse, changes: dict[str, Any]
) -> StoredResponse:
    response = msgspec.json.encode(msgspec.json.decode(stored.response) | changes)
    await stored_by(service).responses.put(
        record.key_id,
        record.argument,
        response,
        stored.conversation(),
        num_before=stored.num_before,
        num_inputs=stored.num_inputs,
        is_known=True,
    )
    return replace(stored, response=response, until=None)


async def list_input_items(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """A page of the items of a stored response's own input.

    Raises:
        ResponseNotFound: if the response is not stored here.
        InvalidParameter: if the query is not valid.
    """
    limit = number_in(record, "limit", PAGE, 1, MAX_PAGE)
    order = order_in(record)
    stored = await stored_by(service).responses.get(record.key_id, record.argument)
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
    """Delete a stored response.

    Raises:
        ResponseNotFound: if it is not stored here.
    """
    response_id = record.argument
    stored = await stored_by(service).responses.get(record.key_id, response_id)
    if stored.until is not None:
        await stopped(service, record.key_id, response_id)
    await stored_by(service).responses.delete(record.key_id, response_id)
    return Reply(msgspec.json.encode(DeletedResponse(response_id)))


def number_in(record: RequestRecord, name: str, default: int, low: int, high: int) -> int:
    """A number from the query.

    Raises:
        InvalidParameter: if it is not a number, or out of range.
    """
    given = record.query.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 20 and low <= int(given) <= high):
        raise InvalidParameter(f"{name} must be between {low} and {high}, got {given[:32]!r}", param=name)
    return int(given)


def order_in(record: RequestRecord) -> Literal["asc", "desc"]:
    """The order that the query asks for.

    Raises:
        InvalidParameter: if it is neither "asc" nor "desc".
    """
    order = record.query.get("order", "desc")
    if order == "asc":
        return "asc"
    if order != "desc":
        raise InvalidParameter("order must be 'asc' or 'desc'", param="order")
    return "desc"


async def _once(events: bytes) -> AsyncGenerator[bytes, None]:
    yield events


def _events(response: dict[str, Any]) -> list[Event]:
    """The events with which a stream would have reported this response."""
    begun = response | {"status": "in_progress", "completed_at": None, "output": [], "usage": None}
    begun["incomplete_details"] = None
    events: list[Event] = [(f"response.{kind}", {"response": begun}) for kind in ("created", "in_progress")]
    for index, item in enumerate(response["output"]):
        events += _item_events(index, item)
    return [*events, (f"response.{response['status']}", {"response": response})]


_CALLS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
"""Types of items that are calls: their events, and the field with their text."""


def _item_events(index: int, item: dict[str, Any]) -> list[Event]:
    place = {"output_index": index, "item_id": item["id"]}
    kind = item["type"]
    nothing: dict[str, Any] = {_CALLS[kind][1]: ""} if kind in _CALLS else {"content": []}
    if "summary" in item:
        nothing["summary"] = []
    new = item | {"status": "in_progress"} | nothing
    events: list[Event] = [("response.output_item.added", {"output_index": index, "item": new})]
    if kind in _CALLS:
        name, field = _CALLS[kind]
        named = {"name": item["name"]} if kind == "function_call" else {}
        events.append((f"{name}.delta", {**place, "delta": item[field]}))
        events.append((f"{name}.done", {**place, **named, field: item[field]}))
    for part_index, part in enumerate(item.get("summary", ())):
        at = {**place, "summary_index": part_index}
        name = "response.reasoning_summary"
        events += [
            (f"{name}_part.added", {**at, "part": part | {"text": ""}}),
            (f"{name}_text.delta", {**at, "delta": part["text"]}),
            (f"{name}_text.done", {**at, "text": part["text"]}),
            (f"{name}_part.done", {**at, "part": part}),
        ]
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
