"""The API's description, generated from its routes and the actual structs of requests and answers."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.replies import JSON
from penstock.ipc.version import VERSION

_REFERENCE = "#/components/schemas/{name}"
_REASONS = {
    400: "The request must be changed.",
    404: "There is no such model, or nothing stored with this id.",
    409: "It is in use, or has ended.",
    410: "The events asked for are no longer kept.",
    413: "The body is too large.",
    415: "The body is not plain application/json in UTF-8.",
    429: "The queue is full, a limit of the API key is reached, or a target would be missed; see Retry-After.",
    500: "The server failed.",
    503: "No engine is serving now.",
    507: "The server's disk is full.",
    504: "The request took longer than allowed.",
    529: "The queue is full, or a target would be missed; see Retry-After.",
}

_SERVER_SENT_EVENT = {
    "type": "object",
    "description": "Each event of the stream, if `stream` is true. `data` is JSON, or [DONE].",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


@cache
def document(routes: tuple[Route, ...]) -> bytes:
    """The description of these routes, as JSON."""
    types = dict.fromkeys(kind for route in routes for kind in (route.answer, route.body) if kind is not None)
    error_kinds = dict.fromkeys(route.error_shape.kind for route in routes)
    found, components = msgspec.json.schema_components([*types, *error_kinds], ref_template=_REFERENCE)
    shapes = dict(zip((*types, *error_kinds), found, strict=True))
    for route in routes:
        if route.body is None or not route.required:
            continue
        component = components[route.body.__name__]
        component["required"] = [*component.get("required", []), *route.required]
        for field in route.required:
            component["properties"][field] = _without_null(component["properties"][field])
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _described(route, shapes)
    info = {"title": "Penstock", "version": VERSION, "description": "An OpenAI-compatible API of a language model."}
    return msgspec.json.encode(
        {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
    )


def _without_null(described: dict[str, Any]) -> dict[str, Any]:
    kinds = [kind for kind in described["anyOf"] if kind != {"type": "null"}]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _described(route: Route, shapes: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"type": "object"} if route.answer is None else shapes[route.answer]
    if route.content_type != JSON:
        answer = {"type": "string"}
    content = {route.content_type: {"schema": answer}}
    if route.streams:
        is_sse = route.stream_type == "text/event-stream"
        content[route.stream_type] = {"schema": _SERVER_SENT_EVENT if is_sse else answer}
    answers: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status in route.errors:
        error = {JSON: {"schema": shapes[route.error_shape.kind]}}
        answers[str(status)] = {"description": _REASONS[status], "content": error}
    described: dict[str, Any] = {"summary": route.summary, "responses": answers}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "required": False, "schema": {"type": kind}} for name, kind in route.query
    ]
    parameters += [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in ("id", "item")
        if f"{{{name}}}" in route.path
    ]
    if parameters:
        described["parameters"] = parameters
    if route.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {route.body_type: {"schema": shapes[route.body]}},
        }
    return described
