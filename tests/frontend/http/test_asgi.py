"""Behind an ASGI server the API is the same: every answer is compared with that of the server of our own."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.http.asgi import AsgiApp, Message
from tests.frontend.fake_scheduler import Script
from tests.frontend.http_client import HELLO, Response, send
from tests.frontend.live_server import LiveServer, live_server

PAGE = "https://chat.example.org"
CHANGES = {"x-request-id", "date", "server", "connection", "keep-alive", "transfer-encoding", "retry-after"}
"""Headers that differ from request to request, or belong to the server that sends them."""

CHAT = json.dumps({"messages": HELLO, "seed": 1}).encode()
STREAM = json.dumps({"messages": HELLO, "seed": 1, "stream": True, "stream_options": {"include_usage": True}}).encode()
REQUESTS: list[tuple[str, str, bytes | None, dict[str, str]]] = [
    ("POST", "/v1/chat/completions", CHAT, {}),
    ("POST", "/chat/completions", STREAM, {}),
    ("POST", "/v1/completions", json.dumps({"prompt": ["Hello", "world"], "n": 2, "max_tokens": 3}).encode(), {}),
    ("POST", "/v1/completions", b'{"prompt": "' + b"x" * 50_000 + b'"}', {}),
    ("POST", "/v1/chat/completions", b"{", {}),
    ("POST", "/v1/chat/completions", CHAT, {"Content-Type": "text/plain"}),
    ("POST", "/v1/chat/completions", CHAT, {"Content-Encoding": "gzip"}),
    ("POST", "/v1/chat/completions", b"[" * 10_000, {}),
    ("GET", "/v1/models", None, {}),
    ("GET", "/v1/models/test/model", None, {}),
    ("GET", "/v1/models/nothing", None, {}),
    ("HEAD", "/v1/models", None, {}),
    ("GET", "/v1/responses/input_tokens", None, {}),
    ("GET", "/v1/responses/resp_none?stream=true&starting_after=x", None, {}),
    ("DELETE", "/v1/responses/resp_none", None, {}),
    ("PUT", "/v1/models", None, {}),
    ("GET", "/nothing", None, {}),
    ("GET", "/health", None, {}),
    ("GET", "/ready", None, {"Host": "evil.example.org"}),
    ("POST", "/reset_prefix_cache", b"", {"Origin": "https://evil.example.org"}),
    ("GET", "/v1/models", None, {"Origin": PAGE}),
    ("OPTIONS", "/v1/models", None, {"Origin": PAGE, "Access-Control-Request-Method": "POST"}),
    ("OPTIONS", "/v1/models", None, {"Origin": "https://evil.example.org", "Access-Control-Request-Method": "POST"}),
]


@pytest.fixture(scope="module")
def both(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("s")
    with live_server(checkpoint, folder, frontend={"cors_origins": (PAGE,), "allowed_hosts": ("127.0.0.1",)}) as live:
        yield live


class Client:
    """One request to the application, as an ASGI server brings it."""

    def __init__(self, method: str, path: str, content: bytes | None = None, **headers: str) -> None:
        path, _, query = path.partition("?")
        given = {"Host": "127.0.0.1"} | ({} if content is None else {"Content-Length": str(len(content))}) | headers
        self.scope: Message = {
            "type": "http", "http_version": "1.1", "method": method, "path": path, "query_string": query.encode(),
            "root_path": "", "client": ("127.0.0.1", 1),
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        }  # fmt: skip
        pieces = [(content or b"")[i : i + 20_000] for i in range(0, len(content or b""), 20_000)] or [b""]
        self._pieces: list[Message] = [
            {"type": "http.request", "body": piece, "more_body": i + 1 < len(pieces)} for i, piece in enumerate(pieces)
        ]
        self.leaves = asyncio.Event()
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if self._pieces:
            return self._pieces.pop(0)
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def content(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    def answer(self) -> Response:
        head, *_, last = self.sent
        assert not last.get("more_body")
        headers = {name.decode(): value.decode() for name, value in head["headers"]}
        return Response(head["status"], headers, self.content)


def mounted(live: LiveServer, client: Client) -> Response:
    async def run() -> Response:
        await AsgiApp(live.server.service)(client.scope, client.receive, client.send)
        return client.answer()

    return asyncio.run_coroutine_threadsafe(run(), live.loop).result(10)


def stable(response: Response) -> Any:
    """An answer without what no two answers have in common."""
    lines, deltas = [], []
    for line in response.text.split("\n\n") if response.content else []:
        try:
            found = json.loads(line.removeprefix("data: "))
        except ValueError:
            found = line
        if isinstance(found, dict):
            found = {key: value for key, value in found.items() if key not in ("id", "created")}
        if isinstance(found, dict) and found.get("object") == "chat.completion.chunk" and found["choices"]:
            deltas.append(found["choices"][0]["delta"].get("content", ""))  # tokens come together as it happens
        else:
            lines.append(found)
    lines.append("".join(deltas))
    return response.status, {k: v for k, v in response.headers.items() if k not in {*CHANGES, "content-length"}}, lines


@pytest.mark.parametrize(
    "asked", REQUESTS, ids=lambda asked: f"{asked[0]} {asked[1][:40]} {len(asked[2] or '')} {asked[3]}"
)
def test_answers_are_those_of_our_own_server(
    both: LiveServer, asked: tuple[str, str, bytes | None, dict[str, str]]
) -> None:
    method, path, content, headers = asked
    if content and "Content-Type" not in headers:
        headers = {"Content-Type": "application/json"} | headers
    expected = stable(send(both, method, path, content, **headers))
    found = stable(mounted(both, Client(method, path, content, **headers)))
    if method == "HEAD":
        expected, found = expected[:1], found[:1]  # the body is the server's to leave out; here it is empty
    assert found == expected


def test_a_path_is_found_behind_a_prefix(both: LiveServer) -> None:
    client = Client("GET", "/some/model/v1/models")
    client.scope["root_path"] = "/some/model"
    assert mounted(both, client).json()["data"][0]["id"] == "test/model"


def test_a_client_that_leaves_ends_its_work(both: LiveServer) -> None:
    both.plays(lambda request, i: Script([5, 6, 7], hangs=True))
    for content in (STREAM, CHAT):
        client = Client("POST", "/v1/chat/completions", content, **{"Content-Type": "application/json"})
        done = asyncio.run_coroutine_threadsafe(
            AsgiApp(both.server.service)(client.scope, client.receive, client.send), both.loop
        )
        both.wait_until(lambda: both.scheduler.num_running == 1)
        assert not done.done()
        both.loop.call_soon_threadsafe(client.leaves.set)
        done.result(5)
        both.wait_until(lambda: both.scheduler.num_running == 0)
        both.wait_until(lambda: both.server.service.engine.num_live == 0)
    both.reset()


def test_a_client_that_leaves_within_its_body_is_forgotten(both: LiveServer) -> None:
    client = Client("POST", "/v1/chat/completions", CHAT, **{"Content-Type": "application/json"})
    client._pieces[0]["more_body"] = True
    client.leaves.set()

    async def run() -> None:
        await AsgiApp(both.server.service)(client.scope, client.receive, client.send)

    asyncio.run_coroutine_threadsafe(run(), both.loop).result(5)
    assert client.sent == []


def test_a_send_that_fails_ends_the_work(both: LiveServer) -> None:
    both.plays(lambda request, i: Script([5, 6, 7], hangs=True))
    client = Client("POST", "/v1/chat/completions", STREAM, **{"Content-Type": "application/json"})

    async def break_off(message: Message) -> None:
        raise ConnectionResetError

    done = asyncio.run_coroutine_threadsafe(
        AsgiApp(both.server.service)(client.scope, client.receive, break_off), both.loop
    )
    done.result(5)
    both.wait_until(lambda: both.scheduler.num_running == 0)
    both.reset()


async def test_start_and_end_of_the_server(both: LiveServer) -> None:
    coming = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    sent: list[Message] = []

    async def receive() -> Message:
        return next(coming)

    async def send(message: Message) -> None:
        sent.append(message)

    await AsgiApp(both.server.service)({"type": "lifespan"}, receive, send)
    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
