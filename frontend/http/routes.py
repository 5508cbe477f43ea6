"""The routes, declared once: listeners and the API's description (`openapi.py`) are generated from them."""

import msgspec

from penstock.frontend import schema
from penstock.frontend import schema_responses as shapes
from penstock.frontend.api import operations, tokenization
from penstock.frontend.api.chat import chat_completions
from penstock.frontend.api.completions import completions
from penstock.frontend.api.service import Service
from penstock.frontend.exchange import metrics
from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.frontend.http.openapi import document
from penstock.frontend.responses import handlers as responses
from penstock.frontend.responses import stored

_GENERATES = (400, 404, 413, 415, 429, 500, 503, 504)
_READS_BODY = (400, 404, 413, 415, 429, 500, 504)
_LOOKS_UP = (404, 500)


class Health(msgspec.Struct, frozen=True):
    status: str


class Version(msgspec.Struct, frozen=True):
    version: str


async def _show_openapi(service: Service, record: RequestRecord, body: bytes) -> Reply:
    is_admin_apart = bool(service.config.frontend.admin_port)
    return Reply(document(tuple(route for route in ROUTES if not (is_admin_apart and route.is_for_admins))))


ROUTES = (
    Route(
        "POST", "/v1/chat/completions", chat_completions, "Answer a conversation",
        schema.ChatCompletion, schema.ChatRequest, _GENERATES, streams=True, aliases=("/chat/completions",),
    ),
    Route(
        "POST", "/v1/completions", completions, "Continue texts",
        schema.Completion, schema.CompletionRequest, _GENERATES, streams=True, aliases=("/completions",),
    ),
    Route(
        "POST", "/v1/responses", responses.create_response, "Answer items, and keep the response",
        shapes.Response, shapes.ResponsesRequest, _GENERATES, streams=True, aliases=("/responses",),
    ),
    Route(
        "GET", "/v1/responses/{id}", stored.retrieve_response, "A stored response",
        shapes.Response, errors=(400, *_LOOKS_UP), streams=True, argument=r"(?!input_tokens$)[^/]+",
        query=(("stream", "boolean"), ("starting_after", "integer")),
    ),
    Route(
        "GET", "/v1/responses/{id}/input_items", stored.list_input_items, "The input of a stored response",
        shapes.InputItems, errors=(400, *_LOOKS_UP),
        query=(("limit", "integer"), ("order", "string"), ("after", "string")),
    ),
    Route(
        "POST", "/v1/responses/input_tokens", responses.count_input_tokens, "Count the tokens of a response's prompt",
        shapes.InputTokens, shapes.ResponsesRequest, _READS_BODY,
    ),
    Route(
        "DELETE", "/v1/responses/{id}", stored.delete_response, "Forget a stored response",
        shapes.DeletedResponse, errors=_LOOKS_UP, argument=r"(?!input_tokens$)[^/]+",
    ),
    Route("GET", "/", operations.index, "Where to go from here", scope=""),
    Route(
        "GET", "/v1/models", operations.list_models, "The models that are served",
        schema.ModelList, errors=(500,), aliases=("/models", "/v1/models/"),
    ),
    Route(
        "GET", "/v1/models/{id}", operations.show_model, "One model",
        schema.ModelCard, errors=_LOOKS_UP, argument=".+", aliases=("/models/{id}",),
    ),
    Route(
        "POST", "/tokenize", tokenization.tokenize, "Token ids of a text or a chat",
        schema.TokenizeAnswer, schema.TokenizeRequest, _READS_BODY,
    ),
    Route(
        "POST", "/detokenize", tokenization.detokenize, "The text of token ids",
        schema.DetokenizeAnswer, schema.DetokenizeRequest, _READS_BODY,
    ),
    Route(
        "POST", "/reset_prefix_cache", operations.reset_prefix_cache, "Forget cached prompts",
        Health, errors=(500, 503), scope="admin",
    ),
    Route("GET", "/tokenizer_info", tokenization.tokenizer_info, "The tokenizer's configuration", errors=(500,)),
    Route(
        "GET", "/health", operations.health, "Whether this process makes progress",
        Health, errors=(500, 503), aliases=("/v1/health", "/ping"), scope="", is_quiet=True,
    ),
    Route(
        "GET", "/ready", operations.ready, "Whether requests would be served now",
        Health, errors=(500, 503), scope="", is_quiet=True,
    ),
    Route(
        "GET", "/metrics", operations.show_metrics, "Metrics in Prometheus' text format", errors=(500,),
        content_type=metrics.CONTENT_TYPE, aliases=("/metrics/",), scope="metrics", is_quiet=True,
    ),
    Route("GET", "/version", operations.version, "The server's version", Version, errors=(500,)),
    Route("GET", "/openapi.json", _show_openapi, "This description", errors=(500,)),
)  # fmt: skip
