"""Limits on what a connection may do before and beside its requests, as far as aiohttp does not set them.

    connected -> head -> body -> answer -> idle -> head -> ...
                  |       |         |      `-- aiohttp: closed after KEEPALIVE_SECONDS
                  |       |         `-- the client reads nothing for slow_reader_timeout: closed
                  |       `-- no byte for body_timeout: closed
                  `-- incomplete after head_timeout, however many bytes have come: closed

aiohttp limits the size and the number of header fields, and stops reading while MAX_MSG_QUEUE_SIZE pipelined
requests wait. Deadlines are checked once a second for all connections together, because a timer for each would cost
more than the requests. A connection beyond max_connections gets a one-line answer, and is closed.

A trusted proxy may begin a connection by telling for whom it is (the PROXY protocol, see `proxies.py`).
"""

import asyncio
import os
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic
from typing import Any

import structlog
from aiohttp import EMPTY_PAYLOAD, StreamReader, web
from aiohttp.http_exceptions import BadHttpMessage

from penstock.frontend.errors import ApiError, MalformedBody, MalformedRequest, ServerError, Unavailable, error_body
from penstock.frontend.http.proxies import PreambleError, TrustedProxies, may_begin_preamble, read_preamble
from penstock.ipc.version import NAME

log = structlog.get_logger()

WATCH_SECONDS = 1.0

MAX_HEADER_FIELDS = 128
MAX_HEADER_BYTES = 8190
"""Limit for the request line, and for each header field."""

READING_BYTES = 16 << 10
"""A client that reads less than this of its waiting bytes within slow_reader_timeout counts as not reading."""

WRITE_BUFFER_BYTES = 8 << 10
"""How much is buffered here for a client before its stream has to wait. TLS would buffer sixty times as much."""

MAX_CONNECTIONS = 8192
"""Most open connections of a frontend, if its limit of open files allows them. Further ones are answered with 503."""

OTHER_DESCRIPTORS = 128
"""A generous estimate of a frontend's open files besides client connections: sockets, pipes, helper processes."""

NO_DESCRIPTORS_SECONDS = 60.0
"""Time between two log lines about connections that cannot be accepted."""

LISTEN_BACKLOG = 4096
"""Connections that may wait to be accepted: a thousand clients may come at once."""

SEND_BUFFER_BYTES, UNSENT_BYTES = 64 << 10, 4 << 10
"""What the kernel buffers for a client: in total, and the part not yet sent because the other side has no room.
The default would be megabytes: minutes of output."""

TLS_SHUTDOWN_SECONDS = 5.0
"""How long closing a TLS connection waits for the client."""

CountClosed = Callable[[str], None]
"""Called with why a connection was closed: "head_timeout", "body_timeout", "slow_reader_timeout", "max_connections"."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits for clients, in seconds."""

    head: float
    body: float
    reading: float


def connections_within_limit(wanted: int) -> int:
    """Return how many connections the process's limit of open files allows, after raising it as far as possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = max(soft - OTHER_DESCRIPTORS, soft // 2)
    log.warning("fewer connections allowed", max_connections=wanted, allowed=allowed, limit=soft)
    return allowed


class Connection(web.RequestHandler):
    """aiohttp's protocol. It also records how long it has been waiting for its client to send, or to read."""

    __slots__ = (
        "_begun", "_body", "_count_closed", "_head_is_due", "_heard_at", "_max_connections", "_num_heads",
        "_num_unread", "_proxies", "_unread_since", "client", "was_too_slow",
    )  # fmt: skip

    def __init__(
        self, server: web.Server, *, max_connections: int, count_closed: CountClosed, proxies: TrustedProxies,
        loop: asyncio.AbstractEventLoop, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(server, loop=loop, **options)
        self._max_connections = max_connections
        self._count_closed = count_closed
        self._proxies = proxies
        self._begun: bytes | None = b""  # the first bytes, until it is clear what they are
        self.client = ""
        """The address for which a proxy has opened the connection, if it has said so by the PROXY protocol."""
        self._body: StreamReader = EMPTY_PAYLOAD  # of the last request with a complete head
        self._num_heads = 0
        self._head_is_due = True  # a head has begun: its first byte has come (for the first head: the connection)
        self._heard_at = monotonic()  # when the head began, or the last byte of the body came
        self._num_unread = 0  # bytes that were waiting for the client when it last read some
        self._unread_since = 0.0
        self.was_too_slow = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        server, connected = self._manager, self.transport
        if server is None or connected is None:
            return
        connected.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        if connected.get_extra_info("sslcontext") is not None:
            self._begun = None  # within TLS the client writes, not the proxy
        if len(server._connections) > self._max_connections:
            self._count_closed("max_connections")
            most = self._max_connections
            self._refuse(Unavailable(f"{most} connections are open, the most that this process accepts", retry_after=1))

    def data_received(self, data: bytes) -> None:
        if self._begun is not None:
            data = self._after_preamble(self._begun + data)
            if self._begun is not None or not data:
                return
        was_in_body = not self._body.is_eof()
        super().data_received(data)
        if self._request_count != self._num_heads:
            if not self._body.is_eof():  # a new message before the last one's end is how aiohttp reports an error
                self._break_body()
            self._num_heads = self._request_count
            self._head_is_due = False
            self._heard_at = monotonic()
            if self._messages:  # take the last one; its handler runs in a later turn of the loop
                self._body = self._messages[-1][1]
        elif was_in_body:
            self._heard_at = monotonic()
        elif not self._head_is_due and data:
            self._head_is_due = True
            self._heard_at = monotonic()

    def _after_preamble(self, begun: bytes) -> bytes:
        """What follows the PROXY protocol's bytes; `_begun` stays set until that is known."""
        self._begun = begun
        if not may_begin_preamble(begun):
            self._begun = None
            return begun
        try:
            preamble = read_preamble(begun)
        except PreambleError as error:
            self._refuse(MalformedRequest(f"the PROXY protocol cannot be read: {error}"))
            return b""
        if preamble is None:
            return b""
        peer = self.transport.get_extra_info("peername") if self.transport is not None else None
        if not peer or not self._proxies.trusts(peer[0]):
            self._refuse(MalformedRequest("the PROXY protocol is for --trusted-proxies only, and this is none of them"))
            return b""
        self._begun, self.client = None, preamble.client
        return begun[preamble.num_bytes :]

    def _refuse(self, error: ApiError) -> None:
        """Answer without a request, and close."""
        if self.transport is not None:
            self.transport.write(_answer(error))
        self.force_close()

    def _break_body(self) -> None:
        """The bytes received are not HTTP: fail the reader of the body, and close the connection after its answer."""
        self._body.set_exception(BadHttpMessage("the rest of it is not HTTP"))
        self._body.feed_eof()
        self.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._num_unread = self._num_buffered()
        self._unread_since = monotonic()

    async def drained(self) -> None:
        """Wait until the client has read what is buffered; at once if it keeps up. aiohttp waits every 64 KiB."""
        if self._paused:
            await self._drain_helper()

    def close_if_late(self, now: float, timeouts: Timeouts) -> None:
        """Close this connection if its client sends too slowly (unless reading is paused), or does not read."""
        if self._paused:
            self._drop_if_unread(now, timeouts.reading)
        if self._reading_paused or self._buffer_paused or self._force_close:
            return
        if self._head_is_due:
            reason, seconds = "head_timeout", timeouts.head
        elif not self._body.is_eof():
            reason, seconds = "body_timeout", timeouts.body
        else:
            return
        if now - self._heard_at > seconds:
            self._count_closed(reason)
            self.force_close()

    def _drop_if_unread(self, now: float, seconds: float) -> None:
        num_unread = self._num_buffered()
        if num_unread <= self._num_unread - READING_BYTES:
            self._num_unread = num_unread
            self._unread_since = now
        elif now - self._unread_since > seconds and not self.was_too_slow:
            self.was_too_slow = True
            self._count_closed("slow_reader_timeout")
            if self.transport is not None:
                self.transport.abort()  # a normal close would wait until everything is read

    def _num_buffered(self) -> int:
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer invalid HTTP with the API's error body, which contains none of the client's bytes."""
        response = super().handle_error(request, status, exc, message)
        error = MalformedBody("this is not a valid HTTP request") if status < 500 else ServerError("internal error")
        answer = web.Response(status=response.status, body=error_body(error), content_type="application/json")
        answer.headers["Server"] = NAME
        answer.force_close()
        return answer


class BoundedRunner(web.AppRunner):
    """aiohttp's runner of one application, with limits on connections. `watch` must run beside it."""

    def __init__(
        self,
        app: web.Application,
        *,
        max_connections: int,
        timeouts: Timeouts,
        count_closed: CountClosed,
        proxies: TrustedProxies,
        shutdown_timeout: float,
        **options: Any,
    ) -> None:
        """`options` are those of aiohttp's protocol."""
        # If a client leaves, its handler ends, which aborts its work.
        super().__init__(app, shutdown_timeout=shutdown_timeout, handler_cancellation=True)
        self._timeouts = timeouts
        self._listening: asyncio.Server | None = None
        self._connection_options = {
            **options,
            "max_line_size": MAX_HEADER_BYTES,
            "max_field_size": MAX_HEADER_BYTES,
            "max_headers": MAX_HEADER_FIELDS,
            "max_connections": max_connections,
            "count_closed": count_closed,
            "proxies": proxies,
        }

    async def listen(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Accept connections from a bound socket; call `setup` before.

        A TLS handshake has a time limit, because before it ends there is no `Connection` to watch.
        """
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit both
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        server, loop = self.server, asyncio.get_running_loop()
        assert server is not None
        self._listening = await loop.create_server(
            lambda: Connection(server, loop=loop, **self._connection_options),
            sock=listener,
            backlog=LISTEN_BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=self._timeouts.head if tls is not None else None,
            ssl_shutdown_timeout=TLS_SHUTDOWN_SECONDS if tls is not None else None,
        )

    async def cleanup(self) -> None:
        """Accept no more connections, and end existing ones."""
        if self._listening is not None:
            self._listening.close()
        await super().cleanup()

    async def watch(self) -> None:
        """Close late connections, for as long as the process runs."""
        told_at = -NO_DESCRIPTORS_SECONDS
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = monotonic()
            if now - told_at >= NO_DESCRIPTORS_SECONDS and not _has_descriptors():
                told_at = now
                log.error("no more files can be opened: new connections are closed at once")
            for connection in self.server.connections if self.server is not None else ():
                if isinstance(connection, Connection):
                    connection.close_if_late(now, self._timeouts)


def _has_descriptors() -> bool:
    """Whether connections can be accepted. The event loop does not report when they cannot."""
    try:
        os.close(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return False
    return True


def drain(request: web.BaseRequest) -> Callable[[], Awaitable[None]]:
    """Return what to await between a stream's pieces, so that at most WRITE_BUFFER_BYTES plus a piece are buffered."""
    protocol = request.protocol
    return protocol.drained if isinstance(protocol, Connection) else protocol._drain_helper


def was_too_slow(request: web.BaseRequest) -> bool:
    """Whether the request's connection was closed because the client did not read."""
    return isinstance(request.protocol, Connection) and request.protocol.was_too_slow


def peer(request: web.BaseRequest) -> str:
    """The address from which a request comes, or for which a proxy has opened its connection."""
    protocol = request.protocol
    return (protocol.client if isinstance(protocol, Connection) else "") or request.remote or ""


def _answer(error: ApiError) -> bytes:
    """An error as it goes over the wire, at the end of a connection."""
    body = error_body(error)
    retry = f"Retry-After: {error.retry_after}\r\n" if error.retry_after else ""
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n{retry}"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
