"""The aiohttp application: serves the exchange's routes, reads requests within limits, sends answers.

Checks of Host and Origin keep web pages from using a server that listens only on its own machine. A page may give its
own host name the address 127.0.0.1 (DNS rebinding) and then send requests with that name as Host, as if the server were
the page's own. So a server without keys that listens on a loopback address, or was given --allowed-hosts, answers only
to localhost, to IP addresses, and to the names of that option. Any page may also send simple requests without a
preflight. These carry the page's Origin, and routes where an empty POST changes something refuse disallowed origins.
"""

import ipaddress
import re
from asyncio import CancelledError
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Literal

from aiohttp import HttpVersion11, web
from aiohttp.helpers import parse_content_type
from aiohttp.http_exceptions import HttpProcessingError

from penstock.config.listening import addresses, is_loopback
from penstock.config.options import FrontendOptions
from penstock.frontend.api.service import Service
from penstock.frontend.errors import (
    ApiError,
    BodyTooLarge,
    ClientTooSlow,
    HostNotAllowed,
    MalformedBody,
    MalformedRequest,
    MethodNotAllowed,
    OriginNotAllowed,
    RouteNotFound,
    TooManyValues,
    Unavailable,
    UnsupportedMediaType,
    UnsupportedTransfer,
)
from penstock.frontend.exchange.exchange import Exchange, Request, Route
from penstock.frontend.exchange.replies import FORM, JSON, Reply, RequestRecord, StreamReply, Upload
from penstock.frontend.http import connections
from penstock.frontend.http.absent import why_absent
from penstock.frontend.http.cors import allow_origins
from penstock.frontend.http.proxies import TrustedProxies
from penstock.frontend.http.routes import DIALECTS, ROUTES
from penstock.frontend.json_size import JsonSize, TooManyValuesError
from penstock.ipc.version import NAME

Part = Literal["all", "public", "admin"]
"""Which routes a listener has; routes for probes are always included."""

SMALL_BODY_BYTES = 4096
"""Bodies this small are cheap to decode, whatever they contain, so most bodies need not be measured."""

MAX_HELD_BODIES = 32
"""How many incomplete bodies of the largest size may be held: a client may delay its last byte as long as it likes."""

MAX_TYPE_LENGTH = 256
"""Limit for the header Content-Type, in characters: the time to parse it is quadratic, 0.8 s for 8 KiB."""

_RETRY_SECONDS = 5

Headers = Mapping[str, Sequence[str]]
"""By their names in lower case."""

_NO_TYPE = "application/octet-stream"
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_SERVER = {"Server": NAME}  # aiohttp's own header would tell versions


def make_app(service: Service, part: Part = "all") -> web.Application:
    """The application with the routes of one listener; `service` must outlive it."""
    options = service.config.frontend
    host, _ = addresses(options)[-1 if part == "admin" else 0]
    mount = _Mount(service, host)

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
            for path in route.paths:
                add[route.method](_path_pattern(path, route), partial(mount.answer, route))
    if part != "admin":
        allow_origins(app, options.cors_origins)
    return app


class _Mount:
    """The exchange behind one listener."""

    def __init__(self, service: Service, host: str) -> None:
        options = service.config.frontend
        self._access = service.access
        self._exchange = Exchange(
            service, service.access, service.metrics, options.max_request_timeout, service.streams
        )
        self._origins = Origins(host, options)
        self._proxies = TrustedProxies(options.trusted_proxies)
        self._bodies = BodyReader(lambda: service.max_body_bytes)

    async def answer(self, route: Route, asked: web.Request) -> web.StreamResponse:
        """Handle one request from its body to the end of its answer."""
        request = self._request(route, asked)
        try:
            async with self._exchange.answer(route, request) as reply:
                if isinstance(reply, StreamReply):
                    return await _send_stream(reply, asked, request)
                response = web.Response(
                    body=reply.body,
                    status=reply.status,
                    headers={"Content-Type": reply.content_type, **_SERVER, **reply.headers},
                )
                if isinstance(request.error, MalformedRequest | UnsupportedTransfer):
                    response.force_close()  # where the request's body ends is uncertain
                await response.prepare(asked)
                await response.write_eof()
                request.num_sent = len(reply.body)
                return response
        except ConnectionError:  # writing failed; the handler's cleanup has aborted the work
            raise CancelledError from None

    def _request(self, route: Route, asked: web.Request) -> Request:
        headers: dict[str, list[str]] = {}
        for name, value in asked.headers.items():
            headers.setdefault(name.lower(), []).append(value)
        error = None
        try:
            _check_framing(headers, is_new=asked.version >= HttpVersion11)
            self._origins.check(headers, route, has_keys=self._access.has_keys)
        except ApiError as found:
            error = found.with_traceback(None)
        return Request(
            headers,
            partial(self._bodies.read, headers, asked.content.readany, any_type=route.takes_any_type),
            dict(asked.query),
            _part(asked, "id"),
            _part(asked, "item"),
            self._proxies.client(connections.peer(asked), headers),
            error,
            partial(_why_left, asked),
            partial(_request_line, asked),
            upload=partial(form, headers, asked.content.readany),
        )

    async def refuse(self, asked: web.Request, unrouted: web.HTTPException) -> web.StreamResponse:
        """Answer a request that has no route, in the API's own error shape."""
        allowed = unrouted.allowed_methods if isinstance(unrouted, web.HTTPMethodNotAllowed) else ()
        return await self.answer(refusing(asked.method, asked.path, allowed), asked)


def refusing(method: str, path: str, allowed: Collection[str] = ()) -> Route:
    """Return a route that refuses a request that no route takes: with status 405 if its path takes other methods.

    `allowed`: the methods that the path takes; empty if nothing is there.
    """
    why = why_absent(method, path[:256])
    error: ApiError = RouteNotFound(f"there is nothing at {path[:256]!r}{': ' if why else ''}{why}")
    if allowed and not why:
        names = ", ".join(sorted(allowed))
        error = MethodNotAllowed(f"{method} is not allowed here; allowed: {names}")
        error.headers = {"Allow": names}

    async def refuse(service: Service, record: RequestRecord, body: bytes) -> Reply:
        raise error

    route = Route("", "unrouted", refuse)
    return replace(route, for_header=tuple((dialect.header, dialect.dressed(route)) for dialect in DIALECTS))


def _path_pattern(path: str, route: Route) -> str:
    """The path in aiohttp's syntax."""
    return path.replace("{id}", f"{{id:{route.argument}}}").replace("{item}", "{item:[^/]+}")


def _part(asked: web.Request, name: str) -> str:
    return asked.match_info.get(name, "").encode(errors="replace").decode()


def _why_left(asked: web.Request) -> ApiError | None:
    return ClientTooSlow("the client did not read for too long") if connections.was_too_slow(asked) else None


def _request_line(asked: web.Request) -> str:
    return f"{asked.method} {asked.raw_path} HTTP/{asked.version.major}.{asked.version.minor}"


async def _send_stream(reply: StreamReply, asked: web.Request, request: Request) -> web.StreamResponse:
    response = web.StreamResponse(headers=_SERVER | reply.headers)
    await response.prepare(asked)
    write, drain = response.write, connections.drain(asked)
    if asked.method != "HEAD":
        async for chunk in reply.chunks:
            await write(chunk)
            request.num_sent += len(chunk)
            await drain()
    await response.write_eof()
    return response


# --- a request on its way in: its head is checked, its body is read within limits ----------------


class Origins:
    """The Host and Origin rules of one listener."""

    def __init__(self, host: str, options: FrontendOptions) -> None:
        """`host` is the address that the listener has."""
        self._guards_host = is_loopback(host) or bool(options.allowed_hosts)
        self._allowed = frozenset(name.lower().rstrip(".") for name in (host, *options.allowed_hosts))
        self._pages = frozenset(options.cors_origins)

    def check(self, headers: Headers, route: Route, *, has_keys: bool) -> None:
        """Raise unless the request's head is acceptable.

        Args:
            headers: of the request.
            route: the requested route.
            has_keys: whether requests need API keys here.

        Raises:
            MalformedRequest: its Host is invalid.
            HostNotAllowed: the request is addressed to another host.
            OriginNotAllowed: the request comes from a web page whose origin is not allowed.
        """
        host = _first(headers, "host")
        if host is None:
            return  # HTTP/1.0, which no browser speaks: aiohttp refuses later versions without one
        name = _name_of(host)
        if not name:
            raise MalformedRequest(f"the header Host must be a name or an address, and a port, got {host[:64]!r}")
        if self._guards_host and not has_keys and route.scope and not self._is_allowed(name):
            raise HostNotAllowed(
                f"the host {name[:64]!r} is not allowed: without API keys this server answers to localhost and to "
                "addresses; --allowed-hosts adds names"
            )
        origin = _first(headers, "origin") if route.is_action else None
        if not (origin is None or origin in self._pages or origin.partition("://")[2].lower() == host.lower()):
            raise OriginNotAllowed(f"the origin {origin[:64]!r} is not allowed; --cors-origins adds origins")

    def _is_allowed(self, name: str) -> bool:
        return name in self._allowed or "*" in self._allowed or _is_safe(name)


def _check_framing(headers: Headers, *, is_new: bool) -> None:
    """Raise if the body has a coding that is not supported, or that does not exist in its version of HTTP."""
    coding = _first(headers, "transfer-encoding")
    if coding is None:
        return
    if coding.strip().lower() != "chunked":
        raise UnsupportedTransfer(f"Transfer-Encoding must be chunked, got {coding[:64]!r}")
    if not is_new:
        raise MalformedRequest("HTTP/1.0 has no Transfer-Encoding")


def _first(headers: Headers, name: str) -> str | None:
    return headers[name][0] if name in headers else None


@lru_cache(256)
def _name_of(host: str) -> str:
    """The name, or address, of a Host header, in lower case; empty if it is invalid."""
    found = _HOST.fullmatch(host)
    return found[1].lower().rstrip(".") if found is not None else ""


@lru_cache(256)
def _is_safe(name: str) -> bool:
    """Whether DNS rebinding is impossible with this name: it needs no name server, or always means this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class BodyReader:
    """Reads the bodies of one process."""

    def __init__(self, max_bytes: Callable[[], int]) -> None:
        """`max_bytes` returns the largest size that a body may have now."""
        self._max_bytes = max_bytes
        self._num_held = 0  # bytes of incomplete bodies

    async def read(
        self, headers: Headers, next_piece: Callable[[], Awaitable[bytes]], *, any_type: bool = False
    ) -> bytes:
        """Read a JSON request's body; the caller gets the only reference.

        Args:
            headers: of the request.
            next_piece: returns the next bytes of the body; empty at its end.
            any_type: the body is JSON, whatever the headers say.

        Raises:
            UnsupportedMediaType: the body is not JSON, or is compressed.
            BodyTooLarge: it has too many bytes.
            TooManyValues: it contains too many values, or too deeply nested ones.
            MalformedBody: it is not valid HTTP.
            Unavailable: too much memory is held for other bodies.
        """
        _check_type(headers, any_type=any_type)
        max_bytes = self._max_bytes()
        told = _first(headers, "content-length")
        length = None if told is None else int(told)
        if length is not None and length > max_bytes:
            raise _too_large(max_bytes, str(length))
        pieces: list[bytes] = []
        num_bytes = 0
        is_small = length is not None and length <= SMALL_BODY_BYTES
        size = None if is_small else JsonSize()
        try:
            while piece := await next_piece():
                pieces.append(piece)
                num_bytes += len(piece)
                self._num_held += len(piece)
                if num_bytes > max_bytes:
                    raise _too_large(max_bytes, "more")
                if self._num_held > MAX_HELD_BODIES * max_bytes:
                    raise Unavailable("too many large request bodies in flight; retry", retry_after=_RETRY_SECONDS)
                if size is not None:
                    size.feed(piece)
        except TooManyValuesError as error:
            raise TooManyValues(f"the body is too large: {error}") from None
        except (HttpProcessingError, ValueError):
            raise _malformed() from None
        finally:
            self._num_held -= num_bytes
        return b"".join(pieces).removeprefix(BOM_UTF8)


async def form(headers: Headers, next_piece: Callable[[], Awaitable[bytes]]) -> Upload:
    """The body of a form, for a handler that reads it piece by piece within limits of its own.

    Raises:
        UnsupportedMediaType: the body is not a form, or is compressed.
    """
    _check_coding(headers)
    given, kind, _ = _content_type(headers)
    if kind != FORM:
        raise UnsupportedMediaType(f"Content-Type must be {FORM}, got {given[:128]!r}")

    async def next_valid() -> bytes:
        try:
            return await next_piece()
        except (HttpProcessingError, ValueError):
            raise _malformed() from None

    return Upload(given, next_valid)


def _malformed() -> MalformedBody:
    return MalformedBody("the body is not valid HTTP: its chunks, or what follows them")


def _too_large(max_bytes: int, got: str) -> BodyTooLarge:
    return BodyTooLarge(f"the body may have at most {max_bytes} bytes, got {got}")


def _check_coding(headers: Headers) -> None:
    if (_first(headers, "content-encoding") or "identity") != "identity":
        raise UnsupportedMediaType("compressed bodies are not accepted")


def _content_type(headers: Headers) -> tuple[str, str, Mapping[str, str]]:
    """The header as given, the type and the parameters in it."""
    given = _first(headers, "content-type") or _NO_TYPE
    if len(given) > MAX_TYPE_LENGTH:
        raise UnsupportedMediaType(f"Content-Type may have at most {MAX_TYPE_LENGTH} characters, got {len(given)}")
    try:
        return given, *parse_content_type(given)
    except Exception:  # the parser, Python's for e-mail, raises anything for parameters that it does not expect
        raise UnsupportedMediaType(f"Content-Type cannot be read: {given[:128]!r}") from None


def _check_type(headers: Headers, *, any_type: bool) -> None:
    _check_coding(headers)
    if any_type:
        return
    _, kind, parameters = _content_type(headers)
    if kind != JSON:
        raise UnsupportedMediaType(f"Content-Type must be application/json, got {kind[:128]!r}")
    charset = parameters.get("charset") or "utf-8"
    if charset.lower() not in ("utf-8", "utf8"):
        raise UnsupportedMediaType(f"the charset must be utf-8, got {charset[:64]!r}")
