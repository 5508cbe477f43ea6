"""Stands between an agent and a server, hands everything on, and keeps what was asked and what became of it."""

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_OF_ONE_CONNECTION = {"connection", "transfer-encoding", "keep-alive", "host", "content-length", "accept-encoding"}
_SECONDS = 300.0


@dataclass(frozen=True)
class Exchange:
    """One request, with the answer to it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int
    answer: str

    @property
    def is_for_model(self) -> bool:
        """Whether it asks the model for something."""
        return self.method == "POST" and not self.path.partition("?")[0].endswith("/count_tokens")


class Recorder:
    """`url` is the one to give to an agent; `exchanges` grow as they end."""

    def __init__(self, target: str) -> None:
        self.exchanges: list[Exchange] = []
        self._target = urlsplit(target).netloc
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                recorder._pass_on(self)

            do_POST = do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def _pass_on(self, asked: BaseHTTPRequestHandler) -> None:
        body = asked.rfile.read(int(asked.headers.get("Content-Length", 0)))
        headers = {name: value for name, value in asked.headers.items() if name.lower() not in _OF_ONE_CONNECTION}
        connection = http.client.HTTPConnection(self._target, timeout=_SECONDS)
        parts: list[bytes] = []
        with contextlib.closing(connection):
            connection.request(asked.command, asked.path, body or None, headers)
            answer = connection.getresponse()
            asked.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _OF_ONE_CONNECTION:
                    asked.send_header(name, value)
            asked.send_header("Connection", "close")  # which is where the answer ends
            asked.end_headers()
            with contextlib.suppress(ConnectionError):  # the agent has read enough
                while part := answer.read1():
                    parts.append(part)
                    asked.wfile.write(part)
                    asked.wfile.flush()
        asked.close_connection = True
        self.exchanges.append(
            Exchange(
                asked.command, asked.path, headers, _json(body), answer.status, b"".join(parts).decode(errors="replace")
            )
        )

    @contextlib.contextmanager
    def running(self) -> Iterator["Recorder"]:
        """Hand on until the block ends."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
