"""Every kind of error with which a request can fail, and the only place that maps them to HTTP.

Before the first byte of an answer, an error is a status and a JSON body; after it, the same JSON body is a server-sent
event (see `sse.py`). Messages name the limit and the value that exceeded it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

import msgspec


class ApiError(Exception):
    """Base of all kinds of errors, which define what differs; `message` is written for the client."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    may_retry: ClassVar[bool] = True  # if the status suggests it; False: clients are told not to

    def __init_subclass__(cls, **facts: str | int | bool) -> None:
        for name, value in facts.items():
            setattr(cls, name, value)

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after  # seconds
        self.headers: dict[str, str] = {}  # sent with the answer, in addition to those of its kind
        self.request_id = ""  # of the request that failed, once known


class InvalidRequest(ApiError, status=400, type="invalid_request_error", code="invalid_request"):
    """The request must be changed; the message says how."""


class MalformedBody(InvalidRequest, code="malformed_body"):
    """The body is not the JSON object that it should be."""


class MalformedRequest(InvalidRequest, code="malformed_request"):
    """The head of the request is not valid HTTP; the connection ends with the answer."""


class TooManyValues(InvalidRequest, code="too_many_values"):
    """The body, or a JSON text in it, has more values than are accepted."""


class InvalidParameter(InvalidRequest, code="invalid_value"):
    """A field has a wrong type or a value out of bounds; `param` names it."""


class InvalidImage(InvalidRequest, code="invalid_image"):
    """An image cannot be read or fetched; `param` names it."""


class UnsupportedParameter(InvalidRequest, code="unsupported_parameter"):
    """A field asks for what does not exist here; refused, so that no client believes that it had an effect."""


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"):
    """Prompt, or prompt plus `max_tokens`, do not fit into the model's context."""


class TemplateFailed(InvalidRequest, code="chat_template_error"):
    """The chat template refuses these messages."""


class GrammarFailed(InvalidRequest, code="grammar_error"):
    """The output's grammar leaves no next token."""


class RouteNotFound(InvalidRequest, status=404, code="not_found"):
    """There is nothing at this path."""


class ModelNotFound(InvalidRequest, status=404, code="model_not_found"):
    """The request names a model that is not served here."""


class NotGenerated(InvalidRequest, status=404, code="model_not_supported"):
    """The served model does not do what the route does."""


class EngineNotFound(InvalidRequest, status=404, code="engine_not_found"):
    """There is no engine of this name behind the server."""


class SimulationFailed(InvalidRequest, code="simulation_failed"):
    """The simulator refuses its options or recording, or takes too much time or memory."""


class RequestNotFound(InvalidRequest, status=404, code="request_not_found"):
    """No engine has, or remembers, a request with this id."""


class ResponseNotFound(InvalidRequest, status=404, code="response_not_found"):
    """There is no response with this id, or it is no longer stored."""


class PreviousResponseNotFound(InvalidRequest, code="previous_response_not_found"):
    """The response to continue from is not stored, or no longer stored."""


class MethodNotAllowed(InvalidRequest, status=405, code="method_not_allowed"):
    """The path exists, but not for this method."""


class BodyTooLarge(InvalidRequest, status=413, code="content_too_large"):
    """The body exceeds --max-body-bytes."""


class UnsupportedMediaType(InvalidRequest, status=415, code="unsupported_media_type"):
    """The body is not plain application/json in UTF-8."""


class InvalidApiKey(InvalidRequest, status=401, code="invalid_api_key"):
    """No API key, or an unknown one."""


class PermissionDenied(InvalidRequest, status=403, code="permission_denied"):
    """The API key lacks the scope."""


class HostNotAllowed(InvalidRequest, status=403, code="host_not_allowed"):
    """The request is addressed to a name that is not this server's."""


class OriginNotAllowed(InvalidRequest, status=403, code="origin_not_allowed"):
    """The request comes from a web page whose origin is not allowed."""


class UnsupportedTransfer(InvalidRequest, status=501, code="unsupported_transfer"):
    """The body's transfer coding is not supported; the connection ends with the answer."""


class Overloaded(ApiError, status=429, type="rate_limit_error", code="queue_full"):
    """The queue is full, or there is no room for an image or a grammar now; trying again later helps."""


class TargetMissed(ApiError, status=429, type="rate_limit_error", code="slo_missed"):
    """The request cannot meet its targets under the current load; trying again later helps."""


class TargetUnattainable(InvalidRequest, code="slo_unattainable"):
    """The request's targets cannot be met here, even without any load."""


class RateLimitExceeded(ApiError, status=429, type="rate_limit_error", code="rate_limit_exceeded"):
    """The API key has used up its limit; other keys are served."""


class ServerError(ApiError):
    """Something failed in the server; its log says what."""


class EngineFailed(ServerError, code="engine_error"):
    """The engine ended this request with an error."""


class InvalidLogits(ServerError, code="invalid_logits", may_retry=False):
    """No token can be sampled from the model's logits for this text; a retry would fail in the same way."""


class EndsWorkers(ServerError, code="request_ends_workers", may_retry=False):
    """Workers crash on this request; a retry would crash another worker."""


class ClientTooSlow(ServerError, code="client_too_slow"):
    """The client did not read its answer."""


class DeadlineExceeded(ServerError, status=504, code="deadline_exceeded"):
    """The request took longer than its deadline, or waited too long in the queue."""


class Unavailable(ServerError, status=503, code="engine_not_ready"):
    """No engine is serving now."""


class EngineLost(Unavailable, code="engine_lost"):
    """The engine was lost in the middle of the request."""


class ShuttingDown(Unavailable, code="shutting_down"):
    """This server accepts no new work, or could not finish the request before it stopped."""


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error body."""

    error: ErrorDetail


def http_headers(error: ApiError) -> dict[str, str]:
    """The headers that are sent with an error."""
    headers = error.headers if error.retry_after is None else error.headers | {"Retry-After": str(error.retry_after)}
    if isinstance(error, InvalidApiKey):
        headers = headers | {"WWW-Authenticate": "Bearer"}
    return headers if error.may_retry else headers | {"x-should-retry": "false"}


def error_body(error: ApiError) -> bytes:
    """The JSON body of an error: of the answer before its first byte, of an SSE event after it."""
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, error.type, error.param, error.code)))


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How an API writes its errors."""

    kind: type  # the body's type, for the API's description
    write: Callable[[ApiError], bytes]
    status: Callable[[ApiError], int] = attrgetter("status")


OPENAI = ErrorShape(ErrorBody, error_body)


def from_exception(error: Exception) -> ApiError:
    """Return what the client is told about any exception; details of unexpected ones stay in the log.

    The traceback's frames are released. They hold the request's body, and an error kept with its request would close a
    reference cycle, which the collector finds late because a body of megabytes may be few objects.
    """
    if not isinstance(error, ApiError):
        return ServerError("internal error")
    error.__context__ = None
    return error.with_traceback(None)
