"""A server's second address, which can be taken away: for a browser the server is gone, as while it starts again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit


class Cuttable:
    """Forwards connections while it is `up`. After `max_bytes` of an answer, if that is set, it cuts all of them."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_up = True
        self.cut_at = b""
        self.url = ""

    def cut(self) -> None:
        """End all connections, and refuse new ones."""
        self.is_up = False
        for writer in self._writers:
            writer.transport.abort()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_up:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(self._target.hostname, self._target.port)
        ends = {writer, back}
        self._writers |= ends
        try:
            with contextlib.suppress(OSError):
                await asyncio.gather(self._pass(reader, back, b""), self._pass(there, writer, b"answer"))
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: bytes) -> None:
        while data := await reader.read(4096):
            writer.write(data)
            await writer.drain()
            if kind and self.cut_at and self.cut_at in data:
                self.cut_at = b""
                await asyncio.sleep(0.05)  # what was written goes out
                self.cut()
        writer.close()

    @classmethod
    @contextlib.asynccontextmanager
    async def serving(cls, url: str) -> AsyncIterator["Cuttable"]:
        """Forward to the server at `url`."""
        found = cls(url)
        server = await asyncio.start_server(found._take, "127.0.0.1", 0)
        found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield found
        finally:
            found.cut()
            server.close()
            await asyncio.sleep(0)
