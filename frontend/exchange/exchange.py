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
"""Tells which engine answers, if there are several; at the head of a stream: which one begins."""

WARNING_HEADER = "x-penstock-warning"
"""Tells the client which parts of its request were honoured in another way than it may expect:
`field: what was done instead; another field: ...`, in the order in which handlers noted it in `RequestRecord.warnings`.
What cannot be honoured at all is refused instead."""

MAX_WARNING_BYTES = 2048
"""Of the header's value: clients and proxies bound what they read."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


Handler = Callable[[Any, RequestRecord, Any], Awaitable[Reply | StreamReply]]
"""Takes the service, the request's record and its body: bytes, or an `Upload` if it is a form; see `replies.py`."""


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path: who may use it, what answers, and how the API's description shows it."""

    method: Literal["GET", "POST", "DELETE", ""]
    path: str  # may have an argument, `{id}`, and a second one, `{item}`
    handler: Handler
    summary: str = ""
    answer: type | None = None  # None: an object of no fixed shape
    body: type | None = None  # None: it takes none
    errors: tuple[int, ...] = ()  # statuses
    streams: bool = False
    stream_type: str = "text/event-stream"
    content_type: str = JSON
    query: tuple[tuple[str, str], ...] = ()  # (name, type)
    argument: str = "[^/]+"  # a pattern for `{id}`
    aliases: tuple[str, ...] = ()  # other paths, such as those of other servers' probes
    scope: Literal["", "infer", "metrics", "admin"] = "infer"  # of API keys; empty: open to all, for it tells nothing
    error_shape: ErrorShape = OPENAI
    body_type: str = JSON  # or FORM: then the handler gets an `Upload`
    takes_any_type: bool = False  # the body is JSON, whatever its Content-Type says
    id_headers: tuple[str, ...] = ("x-request-id",)  # that tell the request's id
    is_quiet: bool = False  # machines ask all the time: not worth a line in the log unless it breaks
    for_header: tuple[tuple[str, "Route"], ...] = ()
    """(header in lower case, what answers a request that has it): another API with the same path."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All its paths: also without `/v1`, which the base URL of some clients lacks; under `/openai`, where KServe
        puts an OpenAI API; and each with a slash at its end."""
        version, is_versioned, rest = self.path.partition("/v1/")
        others = (f"/{rest}", f"/openai{self.path}") if is_versioned and not version else ()
        named = (self.path, *self.aliases, *others)
        slashed = (f"{path}/" for path in named if not path.endswith(("/", "}")))
        return tuple(dict.fromkeys((*named, *slashed)))

    def for_headers(self, headers: Mapping[str, Sequence[str]]) -> "Route":
        """The route for a request with these headers: mostly this one."""
        return next((route for name, route in self.for_header if name in headers), self)

    @property
    def is_action(self) -> bool:
        """Any web page could send it without a preflight, and it does something."""
        return self.method == "POST" and (self.body is None or self.takes_any_type or self.body_type == FORM)

    @property
    def is_for_admins(self) -> bool:
        """For those who run the server. If there is a listener for them, it alone answers."""
        return self.scope in ("metrics", "admin")


async def _no_body() -> bytes:
    return b""


async def _no_form() -> Upload:
    return Upload("", _no_body)


@dataclass(slots=True)
class Request:
    """A request as whoever mounts the exchange knows it."""

    headers: Mapping[str, Sequence[str]]  # by their names in lower case
    read: Callable[[], Awaitable[bytes]] = _no_body  # gives the body; called once, for routes that take one
    query: dict[str, str] = field(default_factory=dict)
    argument: str = ""  # what stands at the place of `{id}` in the route's path
    item: str = ""  # the same of `{item}`
    remote: str = ""  # the client's address
    error: ApiError | None = None  # found in its head by whoever carries it
    why_left: Callable[[], ApiError | None] = lambda: None  # asked when the client is gone before its answer
    line: Callable[[], str] = str  # gives method, path and protocol as they came
    num_sent: int = 0  # bytes of the answer's body, so far
    upload: Callable[[], Awaitable[Upload]] = _no_form  # gives the body of a form, instead of `read`
    key_id: str | None = None  # on whose behalf, for work in the background: nobody waits, and no key is sent


Observer = Callable[[RequestRecord, Route, Request, float], None]
"""Is told of each request that has ended, and when (`time.monotonic`)."""


class Exchange:
    """The exchange of one service; holds nothing of a request when it has been answered."""

    def __init__(
        self, service: Any, access: Access, metrics: Metrics, max_seconds: float, keeper: Keeper | None = None
    ) -> None:
        """`service` is what the handlers work with; a request may take `max_seconds` at most (0: any time).

        The service's `observers` are told of every request. `keeper` keeps streams beyond their connections; without
        one, none is kept.
        """
        self._service = service
        self._keeper = keeper
        self._access = access
        self._metrics = metrics
        self._max_seconds = max_seconds
        self._observers: Sequence[Observer] = service.observers

    @asynccontextmanager
    async def answer(self, route: Route, request: Request) -> AsyncIterator[Reply | StreamReply]:
        """The answer to one request, errors included, with all headers; to be sent inside of the `async with`.

        To leave that normally says that all has been sent. To leave it with an exception says that the client has
        left: what was under way for it ends, also if it leaves before there is an answer.
        """
        if route.for_header:
            route = route.for_headers(request.headers)
        record = RequestRecord(_request_id(request), route.path, monotonic())
        record.query, record.headers = request.query, request.headers
        record.argument, record.item = request.argument, request.item
        record.is_background = request.key_id is not None
        structlog.contextvars.bind_contextvars(request_id=record.request_id)
        self._metrics.live_requests.inc()
        record.status = CLIENT_LEFT  # unless an answer is finished
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
            except Exception:  # the client has its answer, whatever happens here
                log.exception("a request could not be told of")

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
                # The handler alone gets hold of the body, and lets it go when it has been read.
                if route.body_type == FORM:
                    return await route.handler(self._service, record, await request.upload())
                body = request.read() if route.body is not None else _no_body()
                return await route.handler(self._service, record, await body)
        except TimeoutError:
            if record.seconds is None or not timer.expired():
                raise
            raise exceeded(record.seconds) from None

    def _note(self, record: RequestRecord, route: Route, now: float) -> None:
        """The end of a request: its metrics and its one line in the log."""
        self._metrics.note(record, now)
        facts: dict[str, object] = {"endpoint": record.endpoint, "status": record.status}
        if record.key_id:
            facts["key"] = record.key_id
        if record.engine:
            facts["engine"] = record.engine
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
        elif bill is not None:  # the client has left, or a stop string was met: the engine tells it in a moment
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
    """All Authorization headers; where there are none, the keys that come by their other name."""
    given = request.headers.get("authorization", ())
    return given or [f"Bearer {key}" for key in request.headers.get("x-api-key", ())]


def is_resumable(route: Route, headers: Mapping[str, Sequence[str]]) -> bool:
    """Whether the client wants its stream kept, and this route has streams that can be.

    Raises:
        InvalidParameter: if the header is neither true nor false.
    """
    given = headers[RESUMABLE_HEADER][0].strip().lower()
    if given not in ("true", "1", "false", "0"):
        raise InvalidParameter(f"{RESUMABLE_HEADER} must be true or false, got {given[:64]!r}", param=RESUMABLE_HEADER)
    return given in ("true", "1") and route.streams and route.body is not None


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
