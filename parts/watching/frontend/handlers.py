"""GET /debug/steps, /debug/kv, /debug/prefix_tree, /debug/requests/{id}: for administrators."""

import asyncio
import re
from collections.abc import AsyncGenerator

import msgspec

from penstock.frontend.api.service import Service
from penstock.frontend.engine.link import EngineLink
from penstock.frontend.errors import EngineNotFound, InvalidParameter, RequestNotFound, Unavailable
from penstock.frontend.exchange import sse
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.parts.watching.frontend import told
from penstock.parts.watching.frontend.feeds import MAX_HOLD_SECONDS, PAST_SECONDS, StepFeed, Watch, feed_of
from penstock.parts.watching.messages import ListPages, ListPrefixes, PageMap, PrefixTree, RequestLife, ShowLife

_ANSWER_SECONDS = 20.0
_KEEP_ALIVE_SECONDS = 15.0
_LOOK_SECONDS = 1.0
"""How soon a stream notices that the server is shutting down."""

_MAX_ID = 200


async def watch_steps(service: Service, record: RequestRecord, body: bytes) -> StreamReply:
    """GET /debug/steps: what an engine does, as it happens.

    `last=30` begins with the last thirty seconds, as far as somebody watched. `hold=60` has the engine watched for
    sixty seconds more, whenever this stream ends.

    Raises:
        EngineNotFound: there is no engine of that name.
        Unavailable: too many clients watch it already.
        InvalidParameter: the query is not understood.
    """
    seconds = record.query.get("seconds", "")
    if seconds and not re.fullmatch("[0-9]{1,6}", seconds):
        raise InvalidParameter("seconds must be a whole number", param="seconds")
    last, hold = _number(record, "last", 0, PAST_SECONDS), _number(record, "hold", 0, MAX_HOLD_SECONDS)
    label, link = _engine(service, record)
    record.is_stream = True
    feed = feed_of(link, label)
    feed.check()
    if hold:
        feed.hold(hold)
    chunks = _events(service, feed, last, float(seconds or "inf"))
    return StreamReply(chunks, close=lambda: None, headers=sse.HEADERS)


async def _events(service: Service, feed: StepFeed, last: int, seconds: float) -> AsyncGenerator[bytes, None]:
    loop = asyncio.get_running_loop()
    ends = loop.time() + seconds
    with Watch(feed) as watch:
        past = feed.past(last) if last else []
        yield sse.KEEP_ALIVE  # shows the client that it is connected
        for event in past:
            yield event
        said = loop.time()
        while (now := loop.time()) < ends and not service.generations.is_draining:
            events = await watch.next(min(_LOOK_SECONDS, ends - now))
            if events or loop.time() - said > _KEEP_ALIVE_SECONDS:
                said = loop.time()
                yield events or sse.KEEP_ALIVE


async def show_pages(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /debug/kv: who owns each page.

    Raises:
        EngineNotFound: there is no engine of that name.
        Unavailable: it does not answer.
    """
    label, link = _engine(service, record)
    answer = await link.ask(ListPages(0), _ANSWER_SECONDS)
    if not isinstance(answer, PageMap):
        raise Unavailable(f"engine {label} does not answer")
    return Reply(msgspec.json.encode(told.page_map(answer, label)))


async def show_prefixes(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /debug/prefix_tree: what is in the prefix cache.

    Raises:
        InvalidParameter: the query is not understood.
        EngineNotFound, Unavailable: as above.
    """
    depth, most = _number(record, "depth", 16, 64), _number(record, "limit", 400, 2000)
    label, link = _engine(service, record)
    answer = await link.ask(ListPrefixes(0, depth, most), _ANSWER_SECONDS)
    if not isinstance(answer, PrefixTree):
        raise Unavailable(f"engine {label} does not answer")
    tokenizer = service.model.tokenizer
    shown = await tokenizer.off_loop(lambda: told.prefix_tree(answer, label, tokenizer))
    return Reply(msgspec.json.encode(shown))


async def show_life(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /debug/requests/{id}: what has happened to a request, and why it waited.

    Raises:
        RequestNotFound: no engine has, or remembers, the request.
        EngineNotFound, Unavailable: as above.
    """
    engines = [_engine(service, record)]
    if "engine" not in record.query:
        engines = [(service.engine.label(link), link) for link in service.engine.links]
    question = ShowLife(0, record.argument[:_MAX_ID])
    answers = await asyncio.gather(*(link.ask(question, _ANSWER_SECONDS) for _, link in engines))
    if all(answer is None for answer in answers):
        raise Unavailable("no engine answers")
    for (label, _), answer in zip(engines, answers, strict=True):
        if isinstance(answer, RequestLife) and answer.request_id:
            return Reply(msgspec.json.encode(told.life(answer, label)))
    raise RequestNotFound(
        f"no engine knows request {record.argument[:64]!r}; finished requests are kept only while a client watches"
    )


def _engine(service: Service, record: RequestRecord) -> tuple[str, EngineLink]:
    """The engine that the query names, or the first one."""
    book = service.engine
    wanted = record.query.get("engine", "")
    for link in book.links:
        label = book.label(link)
        if wanted in ("", label):
            return label, link
    known = ", ".join(map(book.label, book.links))
    raise EngineNotFound(f"there is no engine {wanted[:64]!r}; there is: {known}")


def _number(record: RequestRecord, name: str, default: int, most: int) -> int:
    text = record.query.get(name)
    if text is None:
        return default
    if not re.fullmatch("[0-9]{1,4}", text) or not 1 <= int(text) <= most:
        raise InvalidParameter(f"{name} must be a number from 1 to {most}", param=name)
    return int(text)
