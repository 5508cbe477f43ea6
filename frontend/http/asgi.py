"""The exchange behind an ASGI server: the same routes and rules as `app.py`, but the other server has the sockets.

    receive: head, body ──▶ Request ──▶ Exchange.answer ──▶ send: head, pieces
       `──── http.disconnect: the request's work ends

Limits on connections (`connections.py`) are left to that server. See https://asgi.readthedocs.io for the messages.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, quote

from penstock.frontend.api.service import Service
from penstock.frontend.errors import ApiError
from penstock.frontend.exchange.exchange import Exchange, Request, Route
from penstock.frontend.exchange.replies import StreamReply
from penstock.frontend.http.app import BodyReader, Origins, form, refusing
from penstock.frontend.http.cors import Cors
from penstock.frontend.http.proxies import TrustedProxies
from penstock.frontend.http.routes import ROUTES

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class RouteTable:
    """Routes by method and path."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: list[tuple[re.Pattern[str], Route]] = []  # in the order of their definition
        for route in routes:
            for path in route.paths:
                if "{id}" in path:
                    pattern = re.escape(path).replace(r"\{id\}", f"({route.argument})").replace(r"\{item\}", "([^/]+)")
                    self._patterns.append((re.compile(pattern), route))
                else:
                    self._exact.setdefault(path, {})[route.method] = route

    def find(self, method: str, path: str) -> tuple[Route, tuple[str, str]]:
        """The route of a request, and its arguments; if there is none, a route that refuses the request."""
        wanted = "GET" if method == "HEAD" else method
        found = {name: (route, ("", "")) for name, route in self._exact.get(path, {}).items()}
        for pattern, route in self._patterns:
            if (match := pattern.fullmatch(path)) is not None:
                found.setdefault(route.method, (route, (match[1], match[2] if pattern.groups > 1 else "")))
        allowed = [*found, "HEAD"] if "GET" in found else [*found]
        return found[wanted] if wanted in found else (refusing(method, path, allowed), ("", ""))


class AsgiApp:
    """All routes of one service, which must outlive it."""

    def __init__(self, service: Service, host: str = "", routes: Iterable[Route] = ROUTES) -> None:
        """`host`: the address that the server listens on; empty: not a loopback address, or unknown."""
        options = service.config.frontend
        self._access = service.access
        self._exchange = Exchange(
            service, service.access, service.metrics, options.max_request_timeout, service.streams
        )
        self._origins = Origins(host, options)
        self._proxies = TrustedProxies(options.trusted_proxies)
        self._bodies = BodyReader(lambda: service.max_body_bytes)
        self._cors = Cors(options.cors_origins)
        self._table = RouteTable(routes)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one scope: a request, or the server's start and end."""
        match scope["type"]:
            case "http":
                await self._serve(scope, receive, send)
            case "lifespan":
                await _live(receive, send)
            case "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1000})

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        client = _Client(receive)
        answer = asyncio.create_task(self._answer(scope, client, send))
        leaving = asyncio.create_task(client.leave())
        try:
            await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answer, leaving):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(answer, leaving, return_exceptions=True)
        if not answer.cancelled() and (error := answer.exception()) is not None:
            raise error

    async def _answer(self, scope: Message, client: "_Client", send: Send) -> None:
        method, path = scope["method"], scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("utf-8", "surrogateescape"))
        [origin] = headers.get("origin", [None])[:1]
        preflight = self._cors.preflight(method, lambda name: next(iter(headers.get(name, ())), None))
        if preflight is not None:
            await _send_head(send, 204, preflight | self._cors.headers(origin))
            await send({"type": "http.response.body"})
            return
        route, arguments = self._table.find(method, path or "/")
        error = None
        try:
            self._origins.check(headers, route, has_keys=self._access.has_keys)
        except ApiError as found:
            error = found.with_traceback(None)
        if route.body is None or error is not None:
            client.skip_body()
        request = Request(
            headers,
            partial(self._bodies.read, headers, client.next_piece, any_type=route.takes_any_type),
            dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)),
            *arguments,
            self._proxies.client((scope.get("client") or ("",))[0], headers),
            error,
            line=partial(_request_line, scope),
            upload=partial(form, headers, client.next_piece),
        )
        with suppress(OSError):  # raised by `send` if the client has left; passing it through `answer` ends the work
            async with self._exchange.answer(route, request) as reply:
                extra = self._cors.headers(origin)
                if isinstance(reply, StreamReply):
                    await _send_head(send, 200, reply.headers | extra)
                    if method != "HEAD":
                        async for chunk in reply.chunks:
                            await send({"type": "http.response.body", "body": chunk, "more_body": True})
                            request.num_sent += len(chunk)
                    await send({"type": "http.response.body"})
                else:
                    length = {"Content-Length": str(len(reply.body))}
                    kind = {"Content-Type": reply.content_type}
                    await _send_head(send, reply.status, kind | length | reply.headers | extra)
                    body = b"" if method == "HEAD" else reply.body
                    await send({"type": "http.response.body", "body": body})
                    request.num_sent = len(body)


def _request_line(scope: Message) -> str:
    path = scope.get("raw_path") or quote(scope["path"]).encode()
    query = scope.get("query_string", b"")
    target = (path + b"?" + query if query else path).decode("latin-1")
    return f"{scope['method']} {target} HTTP/{scope.get('http_version', '1.1')}"


class _Client:
    """What a client sends: the pieces of a body, and later the news that it has left."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_read = asyncio.Event()

    def skip_body(self) -> None:
        """The body will not be read."""
        self._is_read.set()

    async def next_piece(self) -> bytes:
        """The next bytes of the body; empty at its end.

        Raises:
            CancelledError: the client has left.
        """
        while not self._is_read.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            if not message.get("more_body", False):
                self._is_read.set()
            if piece := message.get("body", b""):
                return bytes(piece)
        return b""

    async def leave(self) -> None:
        """Return when the client has left; does not listen for that until the body has been read."""
        await self._is_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def _send_head(send: Send, status: int, headers: dict[str, str]) -> None:
    pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def _live(receive: Receive, send: Send) -> None:
    """Answer the server's start and end. They do nothing here: the service starts earlier, and is closed later."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
