"""The aiohttp application: the exchange's routes, requests in, answers out. All meaning is in the handlers."""

from asyncio import CancelledError
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal

from aiohttp import web

from penstock.frontend.api.service import Service
from penstock.frontend.errors import (
    ApiError,
    ClientTooSlow,
    MalformedRequest,
    MethodNotAllowed,
    RouteNotFound,
    UnsupportedTransfer,
)
from penstock.frontend.exchange.exchange import Exchange, Request, Route
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.http import connections
from penstock.frontend.http.cors import allow_origins
from penstock.frontend.http.requests import BodyReader, Origins
from penstock.frontend.http.routes import ROUTES
from penstock.ipc.version import NAME

Part = Literal["all", "public", "admin"]
"""Which routes a listener has; those for probes are always among them."""

_SERVER = {"Server": NAME}  # aiohttp's own would tell versions


def make_app(service: Service, part: Part = "all") -> web.Application:
    """The application with the routes of one listener; `service` must outlive it."""
    options = service.config.frontend
    mount = _Mount(service, options.admin_host if part == "admin" else options.host)

    @web.middleware
    async def unrouted(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        found = request.match_info.http_exception
        return await (handler(request) if found is None else mount.refuse(request, found))

    app = web.Application(middlewares=[unrouted])
    add = {"GET": app.router.add_get, "POST": app.router.add_post, "DELETE": app.router.add_delete}
    for route in ROUTES:
        if part == "all" or not route.scope or route.is_for_admins == (part == "admin"):
            for path in (route.path, *route.aliases):
                add[route.method](path.replace("{id}", f"{{id:{route.argument}}}"), partial(mount.answer, route))
    if part != "admin":
        allow_origins(app, options.cors_origins)
    return app


class _Mount:
    """The exchange behind one listener."""

    def __init__(self, service: Service, host: str) -> None:
        options = service.config.frontend
        self._access = service.access
        self._exchange = Exchange(service, service.access, service.metrics, options.max_request_timeout)
        self._origins = Origins(host, options)
        self._bodies = BodyReader(lambda: service.max_body_bytes)

    async def answer(self, route: Route, asked: web.Request) -> web.StreamResponse:
        """One request from its body to the end of its answer."""
        request = self._request(route, asked)
        try:
            async with self._exchange.answer(route, request) as reply:
                if isinstance(reply, StreamReply):
                    return await _send_stream(reply, asked)
                response = web.Response(
                    body=reply.body,
                    status=reply.status,
                    headers={"Content-Type": reply.content_type, **_SERVER, **reply.headers},
                )
                if isinstance(request.error, MalformedRequest | UnsupportedTransfer):
                    response.force_close()  # where its body ends is not certain
                await response.prepare(asked)
                await response.write_eof()
                return response
        except ConnectionError:  # noticed while writing; the handler's own end has aborted the work
            raise CancelledError from None

    def _request(self, route: Route, asked: web.Request) -> Request:
        headers: dict[str, list[str]] = {}
        for name, value in asked.headers.items():
            headers.setdefault(name.lower(), []).append(value)
        error = None
        try:
            self._origins.check(asked, route, has_keys=self._access.has_keys)
        except ApiError as found:
            error = found.with_traceback(None)
        return Request(
            headers,
            partial(self._bodies.read, asked),
            dict(asked.query),
            asked.match_info.get("id", "").encode(errors="replace").decode(),
            asked.remote or "",
            error,
            partial(_why_left, asked),
        )

    async def refuse(self, asked: web.Request, unrouted: web.HTTPException) -> web.StreamResponse:
        """The answer to a request without a route, in the API's own error shape."""
        error: ApiError = RouteNotFound(f"there is nothing at {asked.path[:256]!r}")
        if isinstance(unrouted, web.HTTPMethodNotAllowed):
            allowed = ", ".join(sorted(unrouted.allowed_methods))
            error = MethodNotAllowed(f"{asked.method} is not allowed here; allowed: {allowed}")
            error.headers = {"Allow": allowed}

        async def refuse(service: Service, record: RequestRecord, body: bytes) -> Reply:
            raise error

        return await self.answer(Route("", "unrouted", refuse), asked)


def _why_left(asked: web.Request) -> ApiError | None:
    return ClientTooSlow("the client did not read for too long") if connections.was_too_slow(asked) else None


async def _send_stream(reply: StreamReply, asked: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers=_SERVER | reply.headers)
    await response.prepare(asked)
    write, drain = response.write, connections.drain(asked)
    async for chunk in reply.chunks:
        await write(chunk)
        await drain()
    await response.write_eof()
    return response
