"""GET /openapi.json: the API's description, made from the structs that requests and answers really are."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from penstock.frontend import schema
from penstock.frontend import schema_responses as responses
from penstock.frontend.api.service import Service
from penstock.frontend.errors import ErrorBody
from penstock.frontend.exchange import metrics, sse
from penstock.frontend.exchange.access import ADMIN_ROUTES
from penstock.frontend.exchange.replies import JSON, Reply, RequestRecord
from penstock.frontend.version import VERSION

_REFERENCE = "#/components/schemas/{name}"
_GENERATES = (400, 404, 413, 415, 429, 500, 503, 504)
_READS_BODY = (400, 404, 413, 415, 429, 500, 504)
_LOOKS_UP = (404, 500)

_REQUIRED: dict[type, tuple[str, ...]] = {
    schema.ChatRequest: ("messages",),
    schema.CompletionRequest: ("prompt",),
    schema.DetokenizeRequest: ("tokens",),
    responses.ResponsesRequest: ("input",),
}
"""Fields that a request cannot do without. On the wire any may be missing, so that its absence is our own error."""

_REASONS = {
    400: "The request must be changed.",
    404: "There is no such thing here: a model, or a stored response.",
    413: "The body is too large.",
    415: "The body is not plain application/json in UTF-8.",
    429: "The queue is full, or a limit of the API key is reached; see Retry-After.",
    500: "The server failed.",
    503: "No engine serves now.",
    504: "The request took longer than it may.",
}

_SERVER_SENT_EVENT = {
    "type": "object",
    "description": "Each event of the stream, if `stream` is true. `data` is JSON, or [DONE].",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One route as it is described."""

    method: str
    path: str
    summary: str
    answer: type | None = None  # None: an object of no fixed shape
    body: type | None = None
    statuses: tuple[int, ...] = ()
    streams: bool = False
    content_type: str = JSON
    query: tuple[tuple[str, str], ...] = ()  # (name, type)


class Health(msgspec.Struct, frozen=True):
    status: str


class Version(msgspec.Struct, frozen=True):
    version: str


OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        schema.ChatCompletion,
        schema.ChatRequest,
        _GENERATES,
        streams=True,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue texts",
        schema.Completion,
        schema.CompletionRequest,
        _GENERATES,
        streams=True,
    ),
    Operation(
        "post",
        "/v1/responses",
        "Answer items, and keep the response",
        responses.Response,
        responses.ResponsesRequest,
        _GENERATES,
        streams=True,
    ),
    Operation(
        "get",
        "/v1/responses/{id}",
        "A stored response",
        responses.Response,
        statuses=(400, *_LOOKS_UP),
        query=(("stream", "boolean"), ("starting_after", "integer")),
        streams=True,
    ),
    Operation(
        "get",
        "/v1/responses/{id}/input_items",
        "The input of a stored response",
        responses.InputItems,
        statuses=(400, *_LOOKS_UP),
        query=(("limit", "integer"), ("order", "string"), ("after", "string")),
    ),
    Operation(
        "post",
        "/v1/responses/input_tokens",
        "Count the tokens of a response's prompt",
        responses.InputTokens,
        responses.ResponsesRequest,
        _READS_BODY,
    ),
    Operation(
        "delete", "/v1/responses/{id}", "Forget a stored response", responses.DeletedResponse, statuses=_LOOKS_UP
    ),
    Operation("get", "/", "Where to go from here"),
    Operation("get", "/v1/models", "The models that are served", schema.ModelList, statuses=(500,)),
    Operation("get", "/v1/models/{id}", "One model", schema.ModelCard, statuses=_LOOKS_UP),
    Operation(
        "post", "/tokenize", "Token ids of a text or a chat", schema.TokenizeAnswer, schema.TokenizeRequest, _READS_BODY
    ),
    Operation(
        "post",
        "/detokenize",
        "The text of token ids",
        schema.DetokenizeAnswer,
        schema.DetokenizeRequest,
        _READS_BODY,
    ),
    Operation("post", "/reset_prefix_cache", "Forget cached prompts", Health, statuses=(500, 503)),
    Operation("get", "/tokenizer_info", "The tokenizer's configuration", statuses=(500,)),
    Operation("get", "/health", "This process answers and gets on", Health, statuses=(500, 503)),
    Operation("get", "/ready", "Requests would be served now", Health, statuses=(500, 503)),
    Operation(
        "get", "/metrics", "Figures in Prometheus' text format", statuses=(500,), content_type=metrics.CONTENT_TYPE
    ),
    Operation("get", "/version", "The server's version", Version, statuses=(500,)),
    Operation("get", "/openapi.json", "This description", statuses=(500,)),
)


async def show_openapi(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /openapi.json"""
    is_admin_apart = bool(service.config.frontend.admin_port)
    return Reply(_document(ADMIN_ROUTES if is_admin_apart else frozenset()))


@cache
def _document(without: frozenset[str]) -> bytes:
    types = dict.fromkeys(t for operation in OPERATIONS for t in (operation.answer, operation.body) if t is not None)
    _, components = msgspec.json.schema_components([*types, ErrorBody], ref_template=_REFERENCE)
    for kind, fields in _REQUIRED.items():
        component = components[kind.__name__]
        component["required"] = [*component.get("required", []), *fields]
        for field in fields:
            component["properties"][field] = _without_null(component["properties"][field])
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        if operation.path in without:
            continue
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    info = {"title": "Penstock", "version": VERSION, "description": "An OpenAI-compatible API of a language model."}
    document = {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
    return msgspec.json.encode(document)


def _without_null(described: dict[str, Any]) -> dict[str, Any]:
    kinds = [kind for kind in described["anyOf"] if kind != {"type": "null"}]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _described(operation: Operation) -> dict[str, Any]:
    answer: dict[str, Any] = {"type": "object"} if operation.answer is None else _reference(operation.answer)
    if operation.content_type != JSON:
        answer = {"type": "string"}
    content = {operation.content_type: {"schema": answer}}
    if operation.streams:
        content[sse.HEADERS["Content-Type"].partition(";")[0]] = {"schema": _SERVER_SENT_EVENT}
    answers: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status in operation.statuses:
        error = {JSON: {"schema": _reference(ErrorBody)}}
        answers[str(status)] = {"description": _REASONS[status], "content": error}
    described: dict[str, Any] = {"summary": operation.summary, "responses": answers}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "required": False, "schema": {"type": kind}} for name, kind in operation.query
    ]
    if "{id}" in operation.path:
        parameters.append({"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}})
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": _reference(operation.body)}}}
    return described


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}
