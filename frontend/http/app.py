"""The aiohttp application: routes, bodies in, answers out. All meaning is in the handlers."""

import re
import uuid
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from time import monotonic
from typing import Literal

import structlog
from aiohttp import web

from penstock.frontend.api import chat, completions, openapi, status, tokenization
from penstock.frontend.api.service import Service
from penstock.frontend.errors import (
    ApiError,
    ClientTooSlow,
    MalformedRequest,
    MethodNotAllowed,
    RouteNotFound,
    UnsupportedTransfer,
    from_exception,
)
from penstock.frontend.exchange import deadlines
from penstock.frontend.exchange.access import ADMIN_ROUTES, OPEN_ROUTES
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply, error_reply
from penstock.frontend.exchange.warnings_header import warning_headers
from penstock.frontend.http import connections
from penstock.frontend.http.bodies import BodyReader
from penstock.frontend.http.cors import allow_origins
from penstock.frontend.http.origins import Origins
from penstock.frontend.responses import handlers as responses
from penstock.frontend.responses import stored as stored_responses
from penstock.frontend.version import NAME

log = structlog.get_logger()

Part = Literal["all", "public", "admin"]
"""Which routes a listener has; those for probes are always among them."""

Handler = Callable[[Service, RequestRecord, bytes], Awaitable[Reply | StreamReply]]

CLIENT_LEFT = 499
"""nginx's status for a client that went away before its answer; only in logs and metrics."""

MAX_TENANT = 200
"""Characters of a tenant's name on the wire."""

_SERVER = {"Server": NAME}  # aiohttp's own would tell versions

_BODIES = web.AppKey("_BODIES", BodyReader)
_ORIGINS = web.AppKey("_ORIGINS", Origins)

_RESPONSE = "/v1/responses/{id:(?!input_tokens$)[^/]+}"
"""A stored response's path; that of a route beside it is none."""

_PATTERN = re.compile(r":[^}]+\}")
"""What an argument of a path must look like: no part of the route's name."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

POST_ROUTES: dict[str, Handler] = {
    "/v1/chat/completions": chat.chat_completions,
    "/v1/completions": completions.completions,
    "/v1/responses": responses.create_response,
    "/v1/responses/input_tokens": responses.count_input_tokens,
    "/tokenize": tokenization.tokenize,
    "/detokenize": tokenization.detokenize,
}

ACTION_ROUTES: dict[str, Handler] = {
    "/reset_prefix_cache": status.reset_prefix_cache,
}
"""POST routes that take no body."""

GET_ROUTES: dict[str, Handler] = {
    "/": status.index,
    "/v1/models": status.list_models,
    "/health": status.health,
    "/ready": status.ready,
    "/metrics": status.show_metrics,
    "/version": status.version,
    "/tokenizer_info": tokenization.tokenizer_info,
    "/openapi.json": openapi.show_openapi,
}

ALIASES = {
    "/v1/chat/completions": ("/chat/completions",),
    "/v1/completions": ("/completions",),
    "/v1/responses": ("/responses",),
    "/v1/models": ("/models", "/v1/models/"),
    "/v1/models/{id:.+}": ("/models/{id:.+}",),
    "/health": ("/v1/health", "/ping"),
    "/metrics": ("/metrics/",),
}
"""Other paths of the same routes, for clients whose base URL lacks `/v1` and for other servers' probes."""

_QUIET = frozenset({"/health", "/ready", "/metrics"})
"""Routes that machines ask all the time: not worth a log line unless they break."""


def make_app(service: Service, part: Part = "all") -> web.Application:
    """The application with the routes of one listener; `service` must outlive it."""
    app = web.Application(middlewares=[_unrouted(service)])
    app[_BODIES] = BodyReader(lambda: service.max_body_bytes)
    options = service.config.frontend
    app[_ORIGINS] = Origins(options.admin_host if part == "admin" else options.host, options)
    routes: list[tuple[str, str, Handler]] = [
        *(("POST", path, handler) for path, handler in (POST_ROUTES | ACTION_ROUTES).items()),
        *(("GET", path, handler) for path, handler in GET_ROUTES.items()),
        ("GET", "/v1/models/{id:.+}", _show_model),
        ("GET", _RESPONSE, stored_responses.retrieve_response),
        ("GET", "/v1/responses/{id}/input_items", stored_responses.list_input_items),
        ("DELETE", _RESPONSE, stored_responses.delete_response),
    ]
    add = {"GET": app.router.add_get, "POST": app.router.add_post, "DELETE": app.router.add_delete}
    for method, path, handler in routes:
        if part == "all" or path in OPEN_ROUTES or (path in ADMIN_ROUTES) == (part == "admin"):
            answer = partial(_answer, service, _PATTERN.sub("}", path), handler)
            for name in (path, *ALIASES.get(path, ())):
                add[method](name, answer)
    if part != "admin":
        allow_origins(app, options.cors_origins)
    return app


async def _show_model(service: Service, record: RequestRecord, body: bytes) -> Reply:
    return await status.show_model(service, record, body.decode())


async def _answer(service: Service, endpoint: str, handler: Handler, request: web.Request) -> web.StreamResponse:
    """One request from its body to the end of its answer; one log line."""
    record = RequestRecord(_request_id(request), endpoint, monotonic())
    record.query = dict(request.query)
    structlog.contextvars.bind_contextvars(request_id=record.request_id)
    service.metrics.live_requests.inc()
    record.status = CLIENT_LEFT  # unless an answer is finished
    try:
        return await _exchange(service, record, handler, request)
    except ConnectionError:  # noticed while writing; the handler's own end has aborted the work
        raise CancelledError from None
    finally:
        service.metrics.live_requests.dec()
        if record.key_use is not None:
            record.key_use.leave(1 + record.num_added_seqs)
        if record.status == CLIENT_LEFT and connections.was_too_slow(request):
            record.error = ClientTooSlow("the client did not read for too long")
        _note(service, record)


async def _exchange(
    service: Service, record: RequestRecord, handler: Handler, request: web.Request
) -> web.StreamResponse:
    try:
        _check_origin(service, record, request)
        key_use = service.access.check(record.endpoint, _credentials(request))
        record.owner = "" if key_use is None else key_use.key.id
        record.tenant = (record.owner or request.remote or "")[:MAX_TENANT]
        takes_body = request.method == "POST" and record.endpoint not in ACTION_ROUTES
        if takes_body:
            if key_use is not None:
                key_use.enter()
                record.key_use = key_use
            most = service.config.frontend.max_request_timeout
            record.seconds = deadlines.allowed_seconds(request.headers.get(deadlines.HEADER), most)
        async with deadlines.within(record.seconds):
            # The handler alone gets hold of the body, and lets it go when it has been read.
            read = request.app[_BODIES].read(request) if takes_body else _path_argument(request)
            reply = await handler(service, record, await read)
    except Exception as error:
        reply = _reply_to_error(record, error)
    if isinstance(reply, StreamReply):
        return await _send_stream(record, reply, request)
    response = _response(record, reply)
    if isinstance(record.error, MalformedRequest | UnsupportedTransfer):
        response.force_close()  # where its body ends is not certain
    await response.prepare(request)
    await response.write_eof()
    record.status = reply.status
    return response


def _check_origin(service: Service, record: RequestRecord, request: web.Request) -> None:
    request.app[_ORIGINS].check(
        request,
        has_keys=service.access.has_keys,
        is_open=record.endpoint in OPEN_ROUTES,
        is_action=record.endpoint in ACTION_ROUTES,
    )


def _reply_to_error(record: RequestRecord, error: Exception) -> Reply:
    if not isinstance(error, ApiError):
        log.error("request failed", exc_info=error)
    record.error = from_exception(error)
    return error_reply(record.error)


def _response(record: RequestRecord, reply: Reply) -> web.Response:
    headers = {"Content-Type": reply.content_type, **_SERVER, "x-request-id": record.request_id, **reply.headers}
    headers |= warning_headers(record.warnings)
    return web.Response(body=reply.body, status=reply.status, headers=headers)


async def _send_stream(record: RequestRecord, reply: StreamReply, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={**reply.headers, **_SERVER, "x-request-id": record.request_id, **warning_headers(record.warnings)}
    )
    try:
        await response.prepare(request)
        write, drain = response.write, connections.drain(request)
        async for chunk in reply.chunks:
            await write(chunk)
            await drain()
        await response.write_eof()
        record.status = 200
    finally:
        reply.close()
        await reply.chunks.aclose()
    return response


async def _path_argument(request: web.Request) -> bytes:
    """What the pattern of a route without a body caught, as its handler's body."""
    return request.match_info.get("id", "").encode(errors="replace")


def _credentials(request: web.Request) -> Sequence[str]:
    """All Authorization headers; where there are none, the keys that come by their other name."""
    given = request.headers.getall("Authorization", ())
    return given or [f"Bearer {key}" for key in request.headers.getall("X-Api-Key", ())]


def _request_id(request: web.Request) -> str:
    """The client's own id if it is harmless, else a new one."""
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _note(service: Service, record: RequestRecord) -> None:
    """The end of a request: its metrics and its one log line."""
    now = monotonic()
    service.metrics.note(record, now)
    facts: dict[str, object] = {"endpoint": record.endpoint, "status": record.status}
    if record.owner:
        facts["key"] = record.owner
    if record.num_prompt_tokens:
        facts |= {
            "prompt_tokens": record.num_prompt_tokens,
            "cached_tokens": record.num_cached_tokens,
            "output_tokens": record.num_output_tokens,
            "finish_reasons": record.finish_reasons,
            "stream": record.is_stream,
        }
    if record.first_token_at is not None:
        facts["ttft_ms"] = round((record.first_token_at - record.arrived) * 1e3, 1)
    if record.error is not None:
        facts |= {"error": record.error.message, "code": record.error.code}
    quiet = record.endpoint in _QUIET and record.status in (200, 503)
    (log.debug if quiet else log.info)("request", **facts, ms=round((now - record.arrived) * 1e3, 1))


def _unrouted(service: Service) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Unknown paths and methods, in the API's own error shape."""

    @web.middleware
    async def middleware(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.match_info.http_exception is None:
            return await handler(request)
        record = RequestRecord(_request_id(request), "unrouted", monotonic())
        structlog.contextvars.bind_contextvars(request_id=record.request_id)
        unrouted = request.match_info.http_exception
        headers: dict[str, str] = {}
        error: ApiError = RouteNotFound(f"there is nothing at {request.path[:256]!r}")
        try:
            _check_origin(service, record, request)
            service.access.check(record.endpoint, _credentials(request))
            if isinstance(unrouted, web.HTTPMethodNotAllowed):
                allowed = ", ".join(sorted(unrouted.allowed_methods))
                error = MethodNotAllowed(f"{request.method} is not allowed here; allowed: {allowed}")
                headers = {"Allow": allowed}
        except ApiError as denied:
            error = denied
        record.error = error
        reply = error_reply(error)
        record.status = reply.status
        _note(service, record)
        response = _response(record, reply)
        if isinstance(error, MalformedRequest | UnsupportedTransfer):
            response.force_close()
        response.headers.update(headers)
        return response

    return middleware
