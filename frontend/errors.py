"""Everything that can go wrong with a request, as one tree, and the one place that maps it to HTTP.

    ApiError                          status  type                    code
    |-- InvalidRequest                400     invalid_request_error
    |   |-- MalformedBody             400                             malformed_body
    |   |-- MalformedRequest          400                             malformed_request
    |   |-- TooManyValues             400                             too_many_values
    |   |-- InvalidParameter          400                             invalid_value
    |   |-- UnsupportedParameter      400                             unsupported_parameter
    |   |-- PreviousResponseNotFound  400                             previous_response_not_found
    |   |-- ContextLengthExceeded     400                             context_length_exceeded
    |   |-- TemplateFailed            400                             chat_template_error
    |   |-- GrammarFailed             400                             grammar_error
    |   |-- RouteNotFound             404                             not_found
    |   |-- ModelNotFound             404                             model_not_found
    |   |-- ResponseNotFound          404                             response_not_found
    |   |-- MethodNotAllowed          405                             method_not_allowed
    |   |-- BodyTooLarge              413                             content_too_large
    |   |-- UnsupportedMediaType      415                             unsupported_media_type
    |   |-- InvalidApiKey             401                             invalid_api_key
    |   |-- PermissionDenied          403                             permission_denied
    |   |-- HostNotAllowed            403                             host_not_allowed
    |   |-- OriginNotAllowed          403                             origin_not_allowed
    |   `-- UnsupportedTransfer       501                             unsupported_transfer
    |-- Overloaded                    429     rate_limit_error        queue_full
    |-- RateLimitExceeded             429     rate_limit_error        rate_limit_exceeded
    `-- ServerError                   500     server_error            internal_error
        |-- EngineFailed              500                             engine_error
        |-- InvalidLogits             500                             invalid_logits
        |-- EndsWorkers               500                             request_ends_workers
        |-- ClientTooSlow             500                             client_too_slow
        |-- DeadlineExceeded          504                             deadline_exceeded
        `-- Unavailable               503                             engine_not_ready
            |-- EngineLost            503                             engine_lost
            `-- ShuttingDown          503                             shutting_down

Before the first byte of an answer an error is a status and a JSON body; after it, the same JSON body
is a server-sent event (see `sse.py`). Messages name the limit and the value that exceeded it.
"""

from typing import ClassVar

import msgspec


class ApiError(Exception):
    """Base of the tree; `message` is written for the client."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    may_retry: ClassVar[bool] = True  # as far as the status says so; False: clients are told not to

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after  # seconds
        self.headers: dict[str, str] = {}  # that go with the answer, beside those of its kind


class InvalidRequest(ApiError):
    """The client must change the request."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class MalformedBody(InvalidRequest):
    """The body is not the JSON object that it should be."""

    code = "malformed_body"


class MalformedRequest(InvalidRequest):
    """The head of the request is not as HTTP wants it; the connection ends with the answer."""

    code = "malformed_request"


class TooManyValues(InvalidRequest):
    """The body, or a JSON text in it, holds more values than are taken."""

    code = "too_many_values"


class InvalidParameter(InvalidRequest):
    """A field has a wrong type or a value out of bounds; `param` names it."""

    code = "invalid_value"


class UnsupportedParameter(InvalidRequest):
    """A field that is known but not honoured; refused, so that nobody believes that it had an effect."""

    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt plus `max_tokens`, do not fit into the model's context."""

    code = "context_length_exceeded"


class TemplateFailed(InvalidRequest):
    """The chat template refuses these messages."""

    code = "chat_template_error"


class GrammarFailed(InvalidRequest):
    """The grammar that the output must match leaves no next token."""

    code = "grammar_error"


class RouteNotFound(InvalidRequest):
    """There is nothing at this path."""

    status = 404
    code = "not_found"


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"


class ResponseNotFound(InvalidRequest):
    """No response of that id is stored here, or not any more."""

    status = 404
    code = "response_not_found"


class PreviousResponseNotFound(InvalidRequest):
    """The response to go on from is not stored here, or not any more."""

    code = "previous_response_not_found"


class MethodNotAllowed(InvalidRequest):
    """The path exists, but not for this method."""

    status = 405
    code = "method_not_allowed"


class BodyTooLarge(InvalidRequest):
    """The body exceeds --max-body-bytes."""

    status = 413
    code = "content_too_large"


class UnsupportedMediaType(InvalidRequest):
    """The body is not plain application/json in UTF-8."""

    status = 415
    code = "unsupported_media_type"


class InvalidApiKey(InvalidRequest):
    """No key, or none that is known."""

    status = 401
    code = "invalid_api_key"


class PermissionDenied(InvalidRequest):
    """A key without the scope."""

    status = 403
    code = "permission_denied"


class HostNotAllowed(InvalidRequest):
    """The request is addressed to a name that is not this server's."""

    status = 403
    code = "host_not_allowed"


class OriginNotAllowed(InvalidRequest):
    """A page in a browser sends the request, and may not."""

    status = 403
    code = "origin_not_allowed"


class UnsupportedTransfer(InvalidRequest):
    """The body is coded for its transfer in a way that is not supported; the connection ends with the answer."""

    status = 501
    code = "unsupported_transfer"


class Overloaded(ApiError):
    """The queue is full; trying again later helps."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class RateLimitExceeded(ApiError):
    """The API key has used up what it may; others are served."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class ServerError(ApiError):
    """Not the client's fault."""


class EngineFailed(ServerError):
    """The engine ended this request with an error."""

    code = "engine_error"


class InvalidLogits(ServerError):
    """The model's logits for this text are such that no token can be drawn; they would be the same again."""

    code = "invalid_logits"
    may_retry = False


class EndsWorkers(ServerError):
    """Workers die of this request; sending it again would only do that again."""

    code = "request_ends_workers"
    may_retry = False


class ClientTooSlow(ServerError):
    """The client did not read what it asked for."""

    code = "client_too_slow"


class DeadlineExceeded(ServerError):
    """The request took longer than it may, or waited too long in the queue."""

    status = 504
    code = "deadline_exceeded"


class Unavailable(ServerError):
    """No engine serves now."""

    status = 503
    code = "engine_not_ready"


class EngineLost(Unavailable):
    """The engine went away in the middle of the request."""

    code = "engine_lost"


class ShuttingDown(Unavailable):
    """This server takes no new work, or could not finish the request before it ended."""

    code = "shutting_down"


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error body."""

    error: ErrorDetail


def http_status(error: ApiError) -> int:
    """The status that answers an error before the first byte."""
    return error.status


def http_headers(error: ApiError) -> dict[str, str]:
    """The headers that go with it."""
    headers = error.headers if error.retry_after is None else error.headers | {"Retry-After": str(error.retry_after)}
    if isinstance(error, InvalidApiKey):
        headers = headers | {"WWW-Authenticate": "Bearer"}
    return headers if error.may_retry else headers | {"x-should-retry": "false"}


def error_body(error: ApiError) -> bytes:
    """The JSON body: of the answer before the first byte, of an SSE event after it."""
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, error.type, error.param, error.code)))


def from_exception(error: Exception) -> ApiError:
    """What the client is told about any exception; the details of unexpected ones stay in the log.

    The frames that raised it are let go: they hold the request's body, and whoever keeps the error beside the request
    would close a cycle, which the collector finds late because a body of megabytes may be few objects.
    """
    if not isinstance(error, ApiError):
        return ServerError("internal error")
    error.__context__ = None
    return error.with_traceback(None)
