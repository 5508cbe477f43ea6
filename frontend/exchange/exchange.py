"""A request's life around its handler, whichever server carries it: aiohttp, another one, a test.

    head --key, limits--> body, handler (until the deadline) --> answer --sent--> metrics, one line in the log
      `-------------------- ApiError: an answer, too -----------^

The server that mounts the exchange finds the route, makes a `Request` and sends the answer inside `Exchange.answer`.
"""

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any, Literal

import structlog

from penstock.frontend.errors import OPENAI, ApiError, DeadlineExceeded, ErrorShape, InvalidParameter, from_exception
from penstock.frontend.exchange.access import Access, KeyUse
from penstock.frontend.exchange.metrics import Metrics
from penstock.frontend.exchange.replies import (
    FORM,
    JSON,
    Billed,
    Keeper,
    Reply,
    RequestRecord,
    StreamReply,
    Upload,
    error_reply,
)
from penstock.frontend.exchange.tenants import MAX_TENANT
from penstock.frontend.targets import TPOT_HEADER, TTFT_HEADER, targets_in

log = structlog.get_logger()

CLIENT_LEFT = 499
"""nginx's status for a client that went away before its answer; only in logs and metrics."""

DEADLINE_HEADER = "x-request-timeout"

RESUMABLE_HEADER = "x-resumable"
"""`true`: the request's stream outlives its connection for a while, and can be continued."""

ENGINE_HEADER = "x-penstock-engine"
"""Tells which engine answers, if there are several. In front of a stream: the engine that begins it."""

WARNING_HEADER = "x-penstock-warning"
"""Tells the client which parts of its request were not honoured in the way that it may expect:
`field: what was done instead; another field: ...`, in the order in which handlers noted it in `RequestRecord.warnings`.
What cannot be honoured at all is refused instead."""

MAX_WARNING_BYTES = 2048
"""Limit for the header's value: clients and proxies limit the headers that they accept."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


Handler = Callable[[Any, RequestRecord, Any], Awaitable[Reply | StreamReply]]
"""Takes the service, the request's record and its body: bytes, or an `Upload` if it is a form; see `replies.py`."""


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path: who may use it, what answers, and how the API's description shows it."""

    method: Literal["GET", "POST", "DELETE", ""]
    path: str  # may have one argument, `{id}`, or two, `{id}` and `{item}`
    handler: Handler
    summary: str = ""
    answer: type | None = None  # None: an object of no fixed shape
    body: type | None = None  # None: the route takes no body
    errors: tuple[int, ...] = ()  # statuses
    streams: bool = False
    stream_type: str = "text/event-stream"
    content_type: str = JSON
    query: tuple[tuple[str, str], ...] = ()  # (name, type)
    argument: str = "[^/]+"  # a pattern for `{id}`
    aliases: tuple[str, ...] = ()  # other paths, such as those that probes for other servers use
    is_only_versioned: bool = False  # without `/v1` its path is another route's
    scope: Literal["", "infer", "metrics", "admin"] = "infer"  # that a key needs; empty: open to all, nothing secret
    error_shape: ErrorShape = OPENAI
    body_type: str = JSON  # with FORM the handler gets an `Upload`
    takes_any_type: bool = False  # the body is JSON, whatever its Content-Type says
    id_headers: tuple[str, ...] = ("x-request-id",)  # answer headers with the request's id
    is_quiet: bool = False  # polled by machines: logged only when it fails
    required: tuple[str, ...] = ()
    """Fields that a body must have. Its struct makes them optional, so that we can write the error ourselves."""
    for_header: tuple[tuple[str, "Route"], ...] = ()
    """(header in lower case, the route for requests that have it): another API with the same path."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths of the route.

        It also has them without `/v1`, which some clients' base URLs lack; under `/openai`, where KServe puts an OpenAI
        API; and each of these with a slash at its end.
        """
        version, is_versioned, rest = self.path.partition("/v1/")
        others = [f"/{rest}", f"/openai{self.path}"] if is_versioned and not version else []
        named = (self.path, *self.aliases, *others[self.is_only_versioned :])
        slashed = (f"{path}/" for path in named if not path.endswith(("/", "}")))
        return tuple(dict.fromkeys((*named, *slashed)))

    def for_headers(self, headers: Mapping[str, Sequence[str]]) -> "Route":
        """The route for a request with these headers: usually this one."""
        return next((route for name, route in self.for_header if name in headers), self)

    @property
    def is_action(self) -> bool:
        """Whether it changes something, and any web page could send it without a preflight."""
        return self.method == "POST" and (self.body is None or self.takes_any_type or self.body_type == FORM)

    @property
    def is_for_admins(self) -> bool:
        """Whether the route is for administrators. If they have a listener of their own, only that one answers it."""
        return self.scope in ("metrics", "admin")


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API that shares paths with others: requests that have its header are answered in its way."""

    header: str  # in lower case
    error_shape: ErrorShape
    id_headers: tuple[str, ...]
    routes: tuple[Route, ...]  # in place of those with the same method and path

    def dressed(self, route: Route) -> Route:
        """The route, with errors and ids as this API has them."""
        return replace(route, error_shape=self.error_shape, id_headers=self.id_headers)


async def _no_body() -> bytes:
    return b""


async def _no_form() -> Upload:
    return Upload("", _no_body)


@dataclass(slots=True)
class Request:
    """A request as the server that mounts the exchange knows it."""

    headers: Mapping[str, Sequence[str]]  # by their names in lower case
    read: Callable[[], Awaitable[bytes]] = _no_body  # returns the body; called once, for routes that take one
    query: dict[str, str] = field(default_factory=dict)
    argument: str = ""  # the value of `{id}` in the route's path
    item: str = ""  # the value of `{item}`
    remote: str = ""  # the client's address
    error: ApiError | None = None  # that the server found in the request's head
    why_left: Callable[[], ApiError | None] = lambda: None  # called if the client has left before its answer
    line: Callable[[], str] = str  # returns method, path and protocol as received
    num_sent: int = 0  # bytes of the answer's body sent so far
    upload: Callable[[], Awaitable[Upload]] = _no_form  # used for forms instead of `read`
    key_id: str | None = None  # of background work's owner: no client waits, and no key is sent


Observer = Callable[[RequestRecord, Route, Request, float], None]
"""Called with each request that has ended, and the time when it did (`time.monotonic`)."""


class Exchange:
    """The exchange of one service. Keeps nothing of a request after it has been answered."""

    def __init__(
        self, service: Any, access: Access, metrics: Metrics, max_seconds: float, keeper: Keeper | None = None
    ) -> None:
        """`service` is passed to the handlers; a request may take at most `max_seconds` (0: no limit).

        The service's `observers` are called for every request. `keeper` keeps streams beyond their connections; without
        it, no stream is kept.
        """
        self._service = service
        self._keeper = keeper
        self._access = access
        self._metrics = metrics
        self._max_seconds = max_seconds
        self._observers: Sequence[Observer] = service.observers

    @asynccontextmanager
    async def answer(self, route: Route, request: Request) -> AsyncIterator[Reply | StreamReply]:
        """The answer to one request, or its error, with all headers; send it inside the `async with`.

        Leaving the block normally means that everything has been sent. Leaving it with an exception means that the
        client has left: the work for it ends, even if there is no answer yet.
        """
        if route.for_header:
            route = route.for_headers(request.headers)
        record = RequestRecord(_request_id(request), route.path, monotonic())
        record.query, record.headers = request.query, request.headers
        record.argument, record.item = request.argument, request.item
        record.is_background = request.key_id is not None
        structlog.contextvars.bind_contextvars(request_id=record.request_id)
        self._metrics.live_requests.inc()
        record.status = CLIENT_LEFT  # until an answer is finished
        try:
            reply = await self._reply(record, route, request)
            ids = dict.fromkeys(route.id_headers, record.request_id)
            headers = {**ids, **reply.headers, **warning_headers(record.warnings)}
            if record.engine:
                headers[ENGINE_HEADER] = record.engine
            try:
                yield replace(reply, headers=headers)
                if not record.is_kept:
                    record.status = reply.status if isinstance(reply, Reply) else 200
            finally:
                if isinstance(reply, StreamReply):
                    reply.close()
                    await reply.chunks.aclose()
        finally:
            if not record.is_kept:
                self._end(record, route, request)

    def _end(self, record: RequestRecord, route: Route, request: Request) -> None:
        self._metrics.live_requests.dec()
        if record.key_use is not None:
            record.key_use.leave(1 + record.num_added_seqs)
        if record.on_end is not None:
            record.on_end()
        if record.status == CLIENT_LEFT:
            record.error = request.why_left() or record.error
        now = monotonic()
        self._note(record, route, now)
        for observe in self._observers:
            try:
                observe(record, route, request, now)
            except Exception:  # the client already has its answer
                log.exception("access log or trace failed")

    async def _reply(self, record: RequestRecord, route: Route, request: Request) -> Reply | StreamReply:
        try:
            if request.error is not None:
                raise request.error
            key_use: KeyUse | None = None
            if self._access.has_keys and route.scope:
                if request.key_id is None:
                    key_use = self._access.check(route.scope, _credentials(request))
                else:
                    key_use = self._access.of(request.key_id, route.scope)
                record.key_id = key_use.key.id
            record.tenant = (record.key_id or request.remote)[:MAX_TENANT]
            if route.body is not None:
                if key_use is not None:
                    key_use.enter()
                    record.key_use = key_use
                record.seconds = allowed_seconds(request.headers.get(DEADLINE_HEADER, ()), self._max_seconds)
                if TTFT_HEADER in request.headers or TPOT_HEADER in request.headers:
                    record.targets = targets_in(request.headers)
            is_asked = RESUMABLE_HEADER in request.headers and is_resumable(route, request.headers)
            handling = self._handle(record, route, request)
            if self._keeper is None:
                return await handling
            if is_asked:
                return await self._keeper.answer(record, handling, partial(self._end, record, route, request))
            reply = await handling
            if isinstance(reply, StreamReply) and reply.background is not None:
                return self._keeper.detach(record, reply, partial(self._end, record, route, request))
            return reply
        except Exception as error:
            if not isinstance(error, ApiError):
                log.error("request failed", exc_info=error)
            record.error = from_exception(error)
            record.error.request_id = record.request_id
            return error_reply(record.error, route.error_shape)

    async def _handle(self, record: RequestRecord, route: Route, request: Request) -> Reply | StreamReply:
        try:
            async with asyncio.timeout(record.seconds) as timer:
                # Only the handler holds the body, so that it can free it once it has decoded it.
                if route.body_type == FORM:
                    return await route.handler(self._service, record, await request.upload())
                body = request.read() if route.body is not None else _no_body()
                return await route.handler(self._service, record, await body)
        except TimeoutError:
            if record.seconds is None or not timer.expired():
                raise
            raise exceeded(record.seconds) from None

    def _note(self, record: RequestRecord, route: Route, now: float) -> None:
        """Count an ended request in the metrics, and write its one line in the log."""
        self._metrics.note(record, now)
        facts: dict[str, object] = {"endpoint": record.endpoint, "status": record.status}
        if record.key_id:
            facts["key"] = record.key_id
        if record.engine:
            facts["engine"] = record.engine
        if record.adapter:
            facts["adapter"] = record.adapter
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
        if record.targets is not None:
            facts["targets_met"] = record.targets_met
        bill = record.bill
        if bill is not None and bill.is_complete:
            facts |= self._bill_facts(bill)
        elif bill is not None:  # the client left, or a stop string ended it: the engine's bill is still to come
            key = {"key": record.key_id} if record.key_id else {}
            told = log.bind(request_id=record.request_id, **key)
            bill.when_complete(lambda: told.info("bill", **self._bill_facts(bill)))
        if record.error is not None:
            facts |= {"error": record.error.message, "code": record.error.code}
        is_quiet = route.is_quiet and record.status in (200, 503)
        (log.debug if is_quiet else log.info)("request", **facts, ms=round((now - record.arrived) * 1e3, 1))

    def _bill_facts(self, bill: Billed) -> dict[str, object]:
        facts: dict[str, object] = {
            "queue_ms": None if bill.queue_seconds is None else round(bill.queue_seconds * 1e3, 1),
            "steps": bill.num_steps,
            "device_ms": round(bill.device_seconds * 1e3, 3),
            "kv_byte_seconds": round(bill.kv_byte_seconds),
            "saved_tokens": bill.num_saved_tokens,
        }
        if bill.num_preemptions or bill.num_recomputed_tokens:
            facts |= {"preemptions": bill.num_preemptions, "recomputed_tokens": bill.num_recomputed_tokens}
        if bill.waited_for:
            facts["waited_for"] = bill.waited_for
        if bill.cache_miss:
            facts["cache_miss"] = bill.cache_miss
        if self._metrics.price_per_hour:
            facts["price"] = bill.price(self._metrics.price_per_hour)
        return facts


def _request_id(request: Request) -> str:
    """The client's own id if it is harmless, else a new one."""
    [given] = request.headers.get("x-request-id", ("",))[:1]
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _credentials(request: Request) -> Sequence[str]:
    """All Authorization headers; if there are none, the keys in the other header for them."""
    given = request.headers.get("authorization", ())
    return given or [f"Bearer {key}" for key in request.headers.get("x-api-key", ())]


def is_resumable(route: Route, headers: Mapping[str, Sequence[str]]) -> bool:
    """Whether the client wants its stream kept, and this route's streams can be kept.

    Raises:
        InvalidParameter: if the header is neither true nor false.
    """
    given = headers[RESUMABLE_HEADER][0].strip().lower()
    if given not in ("true", "1", "false", "0"):
        raise InvalidParameter(f"{RESUMABLE_HEADER} must be true or false, got {given[:64]!r}", param=RESUMABLE_HEADER)
    return given in ("true", "1") and route.streams and route.body is not None


def allowed_seconds(given: Sequence[str], most: float) -> float | None:
    """Seconds that a request may take by its header and `--max-request-timeout` (0: no limit); None: no limit.

    Raises:
        InvalidParameter: if the header is not a positive number.
    """
    if not given:
        return most or None
    seconds = float(given[0]) if _SECONDS.fullmatch(given[0]) else 0.0
    if seconds <= 0:
        name = DEADLINE_HEADER
        raise InvalidParameter(f"{name} must be a positive number of seconds, got {given[0][:64]!r}", param=name)
    return min(seconds, most) if most else seconds


def exceeded(seconds: float) -> DeadlineExceeded:
    """The error of a request that exceeded `seconds`."""
    return DeadlineExceeded(f"the request was not finished within {seconds:g} s")


def warning_headers(warnings: Iterable[str]) -> dict[str, str]:
    """The warning header, if there are warnings. Duplicates are dropped."""
    told = dict.fromkeys(warnings)
    kept: list[str] = []
    room = MAX_WARNING_BYTES - len("; and 9999 more")
    for text in map(_printable, told):  # one by one: a request may cause thousands, and few have room
        if len(text) + 2 > room:
            break
        kept.append(text)
        room -= len(text) + 2
    if left := len(told) - len(kept):
        kept.append(f"and {left} more")
    return {WARNING_HEADER: "; ".join(kept)} if kept else {}


def _printable(text: str) -> str:
    """Make a text fit for a header, which holds ASCII without line breaks: a warning may quote the client."""
    escaped = text.encode("ascii", "backslashreplace").decode()
    return "".join(char if " " <= char <= "~" else " " for char in escaped)
