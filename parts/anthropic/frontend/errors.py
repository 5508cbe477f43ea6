"""How the Messages API writes errors, and its own statuses: 529 for a full queue, 429 for a used-up key."""

import msgspec

from penstock.frontend.errors import ApiError, ErrorShape, RateLimitExceeded

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Error types by status; other statuses below 500, and 501, are the client's fault (`invalid_request_error`)."""


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """Anthropic's error body."""

    error: AnthropicErrorDetail
    request_id: str | None = None


def status_of(error: ApiError) -> int:
    """The HTTP status of an error."""
    return 529 if error.status == 429 and not isinstance(error, RateLimitExceeded) else error.status


def error_body(error: ApiError) -> bytes:
    """The JSON body of an error: of the answer before its first byte, of an `error` event after it."""
    status = status_of(error)
    other = "api_error" if status >= 500 and status != 501 else "invalid_request_error"
    detail = AnthropicErrorDetail(_TYPES.get(status, other), error.message)
    return msgspec.json.encode(AnthropicErrorBody(detail, error.request_id or None))


ANTHROPIC = ErrorShape(AnthropicErrorBody, error_body, status_of)
