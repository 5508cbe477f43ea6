"""Streams that other frontends of the launch keep: each frontend answers the others over a Unix socket.

    ask: one line of JSON: {"owner", "id", "after", "stop"}
    answer: one line of JSON: {"found", "error", "headers"}; for a stream then frames: 4 bytes of length, bytes;
            a frame of length 0 is its regular end

The sockets are in the launch's folder, which only its user can read. Frontends that connect to their scheduler over TCP
have none, so a stream can be continued only at the frontend that keeps it.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import msgspec

from penstock.frontend.errors import ApiError
from penstock.frontend.exchange.replies import StreamReply
from penstock.frontend.streams.keeper import STOPPED, StreamKeeper, StreamStopped
from penstock.frontend.streams.kept import EventsGone

_PREFIX = "streams-"
_LINE_BYTES = 1 << 16
_ANSWER_SECONDS = 10.0
"""How long a sibling may take to say whether it has a stream: a sibling that hangs must not block the others."""


class Question(msgspec.Struct):
    owner: str
    id: str
    after: int = -1
    stop: bool = False


class Answer(msgspec.Struct):
    found: bool
    error: str = ""
    headers: dict[str, str] = {}


_questions = msgspec.json.Decoder(Question)
_answers = msgspec.json.Decoder(Answer)


class Siblings:
    """The other frontends of one launch."""

    def __init__(self, keeper: StreamKeeper, folder: Path, name: str) -> None:
        """`folder` is the launch's; `name` is this frontend's own, and unique."""
        self._keeper = keeper
        self._folder = folder
        self._path = folder / f"{_PREFIX}{name}.sock"
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Begin to answer the others."""
        self._path.unlink(missing_ok=True)  # left by a predecessor that was killed
        self._server = await asyncio.start_unix_server(self._answer, self._path, limit=_LINE_BYTES)

    async def close(self) -> None:
        """Stop answering the others."""
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def read(self, owner: str, stream_id: str, after: int) -> StreamReply | None:
        """The stream, read from the sibling that keeps it; None if no sibling does.

        Raises:
            EventsGone: the events after `after` are no longer kept.
        """
        found = await self._ask(Question(owner, stream_id, after))
        if found is None:
            return None
        answer, reader, writer = found
        if answer.error:
            writer.close()
            raise EventsGone(answer.error)
        return StreamReply(_frames(reader, writer), close=writer.close, headers=answer.headers)

    async def stop(self, owner: str, stream_id: str) -> bool:
        """Let the sibling that keeps the stream stop it; return whether one does."""
        found = await self._ask(Question(owner, stream_id, stop=True))
        if found is not None:
            found[2].close()
        return found is not None

    async def _ask(self, question: Question) -> tuple[Answer, asyncio.StreamReader, asyncio.StreamWriter] | None:
        others = [path for path in sorted(self._folder.glob(f"{_PREFIX}*.sock")) if path != self._path]
        for path in others:
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    reader, writer = await asyncio.open_unix_connection(path, limit=_LINE_BYTES)
                    try:
                        writer.write(msgspec.json.encode(question) + b"\n")
                        answer = _answers.decode(await reader.readline())
                    except BaseException:
                        writer.close()
                        raise
            except (OSError, TimeoutError, msgspec.DecodeError):  # the sibling has died, hangs, or is about to end
                continue
            if answer.found:
                return answer, reader, writer
            writer.close()
        return None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, msgspec.DecodeError, ValueError):
            question = _questions.decode(await reader.readline())
            kept = self._keeper.find(question.owner, question.id)
            if kept is not None:
                await kept.begun.wait()
            if kept is None or not kept.is_begun:
                _write(writer, Answer(found=False))
            elif question.stop:
                kept.stop(StreamStopped(STOPPED))
                _write(writer, Answer(found=True))
            else:
                try:
                    stream = kept.reader(question.after)
                except ApiError as error:
                    _write(writer, Answer(found=True, error=error.message))
                else:
                    await _send(writer, reader, stream)
            await writer.drain()
        writer.close()


async def _send(writer: asyncio.StreamWriter, reader: asyncio.StreamReader, stream: StreamReply) -> None:
    async def send() -> None:
        _write(writer, Answer(found=True, headers=stream.headers))
        async for piece in stream.chunks:
            writer.write(len(piece).to_bytes(4, "big") + piece)
            await writer.drain()
        writer.write(bytes(4))

    sending = asyncio.create_task(send())
    leaving = asyncio.create_task(reader.read(1))  # returns only when the connection ends
    try:
        await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (sending, leaving):
            task.cancel()
        await asyncio.gather(sending, leaving, return_exceptions=True)
        stream.close()
        await stream.chunks.aclose()


def _write(writer: asyncio.StreamWriter, answer: Answer) -> None:
    writer.write(msgspec.json.encode(answer) + b"\n")


async def _frames(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AsyncGenerator[bytes, None]:
    try:
        while length := int.from_bytes(await reader.readexactly(4), "big"):
            yield await reader.readexactly(length)
    except asyncio.IncompleteReadError:
        raise ConnectionError("the frontend that keeps the stream has ended") from None
    finally:
        writer.close()
