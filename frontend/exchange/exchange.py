"""A request's life around its handler, whatever carries it: aiohttp, another server, a test.

    head --key, limits--> body, handler (until the deadline) --> answer --sent--> metrics, one line in the log
      `-------------------- ApiError: an answer, too -----------^

Whoever mounts it finds the route, makes a `Request` and sends the answer inside `Exchange.answer`.
"""

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Literal

import structlog

from penstock.frontend.errors import ApiError, DeadlineExceeded, InvalidParameter, from_exception
from penstock.frontend.exchange.access import Access, KeyUse
from penstock.frontend.exchange.metrics import Metrics
from penstock.frontend.exchange.replies import JSON, Reply, RequestRecord, StreamReply, error_reply

log = structlog.get_logger()

CLIENT_LEFT = 499
"""nginx's status for a client that went away before its answer; only in logs and metrics."""

DEADLINE_HEADER = "x-request-timeout"

WARNING_HEADER = "x-penstock-warning"
"""Tells the client which parts of its request were honoured in another way than it may expect:
`field: what was done instead; another field: ...`, in the order in which handlers noted it in `RequestRecord.warnings`.
What cannot be honoured at all is refused instead."""

MAX_WARNING_BYTES = 2048
"""Of the header's value: clients and proxies bound what they read."""

MAX_TENANT = 200
"""Characters of a tenant's name on the wire."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


Handler = Callable[[Any, RequestRecord, bytes], Awaitable[Reply | StreamReply]]
"""Takes the service, the request's record and its body; see `replies.py`."""


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path: who may use it, what answers, and how the API's description shows it."""

    method: Literal["GET", "POST", "DELETE", ""]
    path: str  # may have an argument, `{id}`
    handler: Handler
    summary: str = ""
    answer: type | None = None  # None: an object of no fixed shape
    body: type | None = None  # None: it takes none
    errors: tuple[int, ...] = ()  # statuses
    streams: bool = False
    content_type: str = JSON
    query: tuple[tuple[str, str], ...] = ()  # (name, type)
    argument: str = "[^/]+"  # a pattern
    aliases: tuple[str, ...] = ()  # other paths: for clients whose base URL lacks `/v1`, and other servers' probes
    scope: Literal["", "infer", "metrics", "admin"] = "infer"  # of API keys; empty: open to all, for it tells nothing
    is_quiet: bool = False  # machines ask all the time: not worth a line in the log unless it breaks

    @property
    def is_action(self) -> bool:
        """It changes something, and no body says that this is meant."""
        return self.method == "POST" and self.body is None

    @property
    def is_for_admins(self) -> bool:
        """For those who run the server. If there is a listener for them, it alone answers."""
        return self.scope in ("metrics", "admin")


async def _no_body() -> bytes:
    return b""


@dataclass(slots=True)
class Request:
    """A request as whoever mounts the exchange knows it."""

    headers: Mapping[str, Sequence[str]]  # by their names in lower case
    read: Callable[[], Awaitable[bytes]] = _no_body  # gives the body; called once, for routes that take one
    query: dict[str, str] = field(default_factory=dict)
    argument: str = ""  # what stands at the place of `{id}` in the route's path
    remote: str = ""  # the client's address
    error: ApiError | None = None  # found in its head by whoever carries it
    why_left: Callable[[], ApiError | None] = lambda: None  # asked when the client is gone before its answer


class Exchange:
    """The exchange of one service; holds nothing of a request when it has been answered."""

    def __init__(self, service: Any, access: Access, metrics: Metrics, max_seconds: float) -> None:
        """`service` is what the handlers work with; a request may take `max_seconds` at most (0: any time)."""
        self._service = service
        self._access = access
        self._metrics = metrics
        self._max_seconds = max_seconds

    @asynccontextmanager
    async def answer(self, route: Route, request: Request) -> AsyncIterator[Reply | StreamReply]:
        """The answer to one request, errors included, with all headers; to be sent inside of the `async with`.

        To leave that normally says that all has been sent. To leave it with an exception says that the client has
        left: what was under way for it ends, also if it leaves before there is an answer.
        """
        record = RequestRecord(_request_id(request), route.path, monotonic())
        record.query, record.argument = request.query, request.argument
        structlog.contextvars.bind_contextvars(request_id=record.request_id)
        self._metrics.live_requests.inc()
        record.status = CLIENT_LEFT  # unless an answer is finished
        try:
            reply = await self._reply(record, route, request)
            headers = {"x-request-id": record.request_id, **reply.headers, **warning_headers(record.warnings)}
            try:
                yield replace(reply, headers=headers)
                record.status = reply.status if isinstance(reply, Reply) else 200
            finally:
                if isinstance(reply, StreamReply):
                    reply.close()
                    await reply.chunks.aclose()
        finally:
            self._metrics.live_requests.dec()
            if record.key_use is not None:
                record.key_use.leave(1 + record.num_added_seqs)
            if record.status == CLIENT_LEFT:
                record.error = request.why_left() or record.error
            self._note(record, route)

    async def _reply(self, record: RequestRecord, route: Route, request: Request) -> Reply | StreamReply:
        try:
            if request.error is not None:
                raise request.error
            key_use: KeyUse | None = None
            if self._access.has_keys and route.scope:
                key_use = self._access.check(route.scope, _credentials(request))
                record.key_id = key_use.key.id
            record.tenant = (record.key_id or request.remote)[:MAX_TENANT]
            if route.body is not None:
                if key_use is not None:
                    key_use.enter()
                    record.key_use = key_use
                record.seconds = allowed_seconds(request.headers.get(DEADLINE_HEADER, ()), self._max_seconds)
            return await self._handle(record, route, request)
        except Exception as error:
            if not isinstance(error, ApiError):
                log.error("request failed", exc_info=error)
            record.error = from_exception(error)
            return error_reply(record.error)

    async def _handle(self, record: RequestRecord, route: Route, request: Request) -> Reply | StreamReply:
        try:
            async with asyncio.timeout(record.seconds) as timer:
                # The handler alone gets hold of the body, and lets it go when it has been read.
                body = request.read() if route.body is not None else _no_body()
                return await route.handler(self._service, record, await body)
        except TimeoutError:
            if record.seconds is None or not timer.expired():
                raise
            raise exceeded(record.seconds) from None

    def _note(self, record: RequestRecord, route: Route) -> None:
        """The end of a request: its metrics and its one line in the log."""
        now = monotonic()
        self._metrics.note(record, now)
        facts: dict[str, object] = {"endpoint": record.endpoint, "status": record.status}
        if record.key_id:
            facts["key"] = record.key_id
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
        is_quiet = route.is_quiet and record.status in (200, 503)
        (log.debug if is_quiet else log.info)("request", **facts, ms=round((now - record.arrived) * 1e3, 1))


def _request_id(request: Request) -> str:
    """The client's own id if it is harmless, else a new one."""
    [given] = request.headers.get("x-request-id", ("",))[:1]
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _credentials(request: Request) -> Sequence[str]:
    """All Authorization headers; where there are none, the keys that come by their other name."""
    given = request.headers.get("authorization", ())
    return given or [f"Bearer {key}" for key in request.headers.get("x-api-key", ())]


def allowed_seconds(given: Sequence[str], most: float) -> float | None:
    """Seconds that a request may take, by its header and `--max-request-timeout` (0: no bound); None for no limit.

    Raises:
        InvalidParameter: if the header is no positive number.
    """
    if not given:
        return most or None
    seconds = float(given[0]) if _SECONDS.fullmatch(given[0]) else 0.0
    if seconds <= 0:
        name = DEADLINE_HEADER
        raise InvalidParameter(f"{name} must be a positive number of seconds, got {given[0][:64]!r}", param=name)
    return min(seconds, most) if most else seconds


def exceeded(seconds: float) -> DeadlineExceeded:
    """The error of a request that took so long."""
    return DeadlineExceeded(f"the request was not finished within {seconds:g} s")


def warning_headers(warnings: Iterable[str]) -> dict[str, str]:
    """The header for these sentences, if there are any. Each is told once."""
    texts = [_printable(warning) for warning in dict.fromkeys(warnings)]
    kept: list[str] = []
    room = MAX_WARNING_BYTES - len("; and 9999 more")
    for text in texts:
        if len(text) + 2 > room:
            break
        kept.append(text)
        room -= len(text) + 2
    if left := len(texts) - len(kept):
        kept.append(f"and {left} more")
    return {WARNING_HEADER: "; ".join(kept)} if kept else {}


def _printable(text: str) -> str:
    """Headers hold ASCII without line breaks: a client's own words may be in a warning."""
    escaped = text.encode("ascii", "backslashreplace").decode()
    return "".join(char if " " <= char <= "~" else " " for char in escaped)
