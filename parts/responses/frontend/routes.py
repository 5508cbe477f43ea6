"""The Responses API."""

from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.statuses import GENERATES, LOOKS_UP, READS_BODY
from penstock.parts.responses.frontend import create, stored
from penstock.parts.responses.frontend import schema as shapes
from penstock.parts.responses.frontend.compaction import compact

ROUTES = (
    Route(
        "POST", "/v1/responses", create.create_response, "Answer items, and keep the response",
        shapes.Response, shapes.ResponsesRequest, (*GENERATES, 507), streams=True, required=("input",),
    ),
    Route(
        "GET", "/v1/responses/{id}", stored.retrieve_response, "A stored response",
        shapes.Response, errors=(400, *LOOKS_UP, 410), streams=True, argument=r"(?!(input_tokens|compact)$)[^/]+",
        query=(("stream", "boolean"), ("starting_after", "integer")),
    ),
    Route(
        "POST", "/v1/responses/{id}/cancel", stored.cancel_response, "Cancel a response in the background",
        shapes.Response, errors=(400, *LOOKS_UP),
    ),
    Route(
        "GET", "/v1/responses/{id}/input_items", stored.list_input_items, "The input of a stored response",
        shapes.InputItems, errors=(400, *LOOKS_UP),
        query=(("limit", "integer"), ("order", "string"), ("after", "string")),
    ),
    Route(
        "POST", "/v1/responses/input_tokens", create.count_input_tokens, "Count the tokens of a response's prompt",
        shapes.InputTokens, shapes.ResponsesRequest, READS_BODY,
    ),
    Route(
        "POST", "/v1/responses/compact", compact, "Replace a conversation by a summary",
        shapes.CompactedResponse, shapes.CompactRequest, GENERATES,
    ),
    Route(
        "DELETE", "/v1/responses/{id}", stored.delete_response, "Forget a stored response",
        shapes.DeletedResponse, errors=LOOKS_UP, argument=r"(?!(input_tokens|compact)$)[^/]+",
    ),
)  # fmt: skip
