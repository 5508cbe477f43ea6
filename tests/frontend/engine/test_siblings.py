"""Streams that another frontend of the launch keeps."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from penstock.frontend.errors import ApiError
from penstock.frontend.exchange import sse
from penstock.frontend.exchange.replies import RequestRecord, StreamReply
from penstock.frontend.streams.keeper import StreamKeeper
from penstock.frontend.streams.kept import Bounds, EventsGone
from penstock.frontend.streams.siblings import Siblings


class Source:
    """A stream of numbers, which waits for `more` before the last one."""

    def __init__(self) -> None:
        self.more = asyncio.Event()
        self.errors: list[ApiError] = []

    async def handle(self) -> StreamReply:
        return StreamReply(self._chunks(), close=lambda: None, headers=sse.HEADERS, fail=self._fail)

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        for number in range(5):
            yield sse.event(b"%d" % number)
        yield sse.KEEP_ALIVE
        await self.more.wait()
        yield sse.DONE

    def _fail(self, error: ApiError) -> None:
        self.errors.append(error)
        self.more.set()


def record(owner: str, request_id: str) -> RequestRecord:
    return RequestRecord(request_id, "/", 0.0, key_id=owner)


async def text(stream: StreamReply) -> str:
    pieces = [piece async for piece in stream.chunks if not piece.startswith(b":")]
    stream.close()
    return b"".join(pieces).decode()


@pytest.fixture
def keepers() -> list[StreamKeeper]:
    return [StreamKeeper(1 << 20, Bounds(1 << 14, 60.0)) for _ in range(2)]


async def test_a_stream_is_continued_and_stopped_by_any_frontend(keepers: list[StreamKeeper], sockets: Path) -> None:
    first, second = (Siblings(keeper, sockets, str(index)) for index, keeper in enumerate(keepers))
    await first.listen()
    await second.listen()
    (sockets / "streams-dead.sock").touch()
    source, ended = Source(), list[str]()
    reply = await keepers[0].answer(record("me", "a"), source.handle(), lambda: ended.append("a"))
    assert isinstance(reply, StreamReply)
    reply.close()  # its client has left
    found = await second.read("me", "a", 1)
    assert found is not None
    assert found.headers == sse.HEADERS
    assert await second.read("other", "a", 1) is None
    assert await second.read("me", "b", 1) is None
    reading = asyncio.create_task(text(found))
    source.more.set()
    expected = "".join(f"id: {number}\ndata: {number}\n\n" for number in (2, 3, 4)) + "id: 5\ndata: [DONE]\n\n"
    assert await reading == expected
    assert ended == ["a"]
    other = Source()
    assert isinstance(await keepers[0].answer(record("me", "b"), other.handle(), lambda: None), StreamReply)
    assert not await second.stop("other", "b")
    assert await second.stop("me", "b")
    assert [error.code for error in other.errors] == ["stream_stopped"]
    assert await second.read("me", "b", -1) is None
    await first.close()
    assert await second.read("me", "a", -1) is None
    await second.close()


async def test_a_frontend_that_dies_does_not_end_a_stream_properly(keepers: list[StreamKeeper], sockets: Path) -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b'{"found": true}\n' + (5).to_bytes(4, "big") + b"abc")
        writer.close()

    async with await asyncio.start_unix_server(die, sockets / "streams-1.sock"):
        found = await Siblings(keepers[0], sockets, "0").read("me", "a", -1)
        assert found is not None
        with pytest.raises(ConnectionError):
            await text(found)


async def test_what_is_gone_is_said_from_afar(sockets: Path) -> None:
    keeper = StreamKeeper(8192, Bounds(20, 60.0))
    first, second = Siblings(keeper, sockets, "0"), Siblings(StreamKeeper(1, Bounds(20, 60.0)), sockets, "1")
    await first.listen()
    source = Source()
    source.more.set()
    reply = await keeper.answer(record("", "a"), source.handle(), lambda: None)
    assert isinstance(reply, StreamReply)
    assert (await text(reply)).count("data: ") == 6
    with pytest.raises(EventsGone):
        await second.read("", "a", 0)
    await first.close()
