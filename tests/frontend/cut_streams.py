"""A client that loses its connection after a number of bytes, and goes on from the last whole event that it has."""

import json
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.frontend.http_client import Listening


@dataclass
class CutClient:
    """What has come of one stream over all its connections. `mark` ends an event."""

    live: Listening
    stream_id: str
    mark: bytes = b"\n\n"
    headers: dict[str, str] = field(default_factory=dict)
    events: list[bytes] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    is_complete: bool = False  # the body came to its proper end
    before_leaving: Callable[[], None] = lambda: None

    @property
    def last_id(self) -> int:
        """The number of the last event; -1: there is none."""
        return len(self.events) - 1

    def post(self, path: str, body: dict[str, Any], num_bytes: int | None = None, *, is_resumable: bool = True) -> None:
        """Begin the stream, and read so many bytes of the answer; None: all."""
        content = json.dumps(body).encode()
        head = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        head |= {"x-resumable": str(is_resumable).lower(), "x-request-id": self.stream_id}
        self._send("POST", path, head, content, num_bytes)

    def go_on(self, num_bytes: int | None = None, *, by_header: bool = False) -> None:
        """Continue it on another connection."""
        path, headers = f"/v1/streams/{self.stream_id}", {}
        if by_header and self.events:
            headers["Last-Event-ID"] = str(self.last_id)
        elif self.events:
            path += f"?starting_after={self.last_id}"
        self._send("GET", path, headers, b"", num_bytes)

    def _send(self, method: str, path: str, headers: dict[str, str], content: bytes, num_bytes: int | None) -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in (self.headers | headers).items()]
        with socket.create_connection(("127.0.0.1", self.live.port), 60) as connection:
            connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
            received = bytearray()
            while num_bytes is None or len(received) < num_bytes:
                piece = connection.recv(1 << 16 if num_bytes is None else num_bytes - len(received))
                if not piece:
                    break
                received += piece
            self.before_leaving()
            if received:  # a reset, not an orderly end: what is under way is lost
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._read(bytes(received))

    def _read(self, received: bytes) -> None:
        head, found, rest = received.partition(b"\r\n\r\n")
        if not found:
            return
        self.statuses.append(int(head.split()[1]))
        assert self.statuses[-1] == 200, received
        assert b"chunked" in head
        body, self.is_complete = _unchunked(rest)
        *whole, _ = body.split(self.mark)
        for event in whole:
            if event.startswith(b":"):
                continue
            if self.mark == b"\n\n" and event.startswith(b"id: "):
                assert event.startswith(b"id: %d\n" % len(self.events)), event
                event = event.partition(b"\n")[2]
            self.events.append(event)


def _unchunked(body: bytes) -> tuple[bytes, bool]:
    found = b""
    while True:
        size, is_whole, rest = body.partition(b"\r\n")
        if not is_whole:
            return found, False
        length = int(size, 16)
        if length == 0:
            return found, True
        found += rest[:length]
        if len(rest) < length + 2:
            return found, False
        body = rest[length + 2 :]
