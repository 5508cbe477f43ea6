"""A plain HTTP client for tests that look at bytes, statuses and events."""

import http.client
import json
from dataclasses import dataclass
from typing import Any, Protocol

from tests.frontend.live_server import LiveServer

HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Response:
    """A whole answer; header names are in lower case."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode()

    def json(self) -> Any:
        return json.loads(self.content)


class Listening(Protocol):
    """Whatever has a port."""

    @property
    def port(self) -> int: ...


def send(live: Listening, method: str, path: str, content: bytes | None = None, **headers: str) -> Response:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
    try:
        connection.request(method, path, content, headers)
        answer = connection.getresponse()
        return Response(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def post(live: Listening, path: str, body: Any, **headers: str) -> Response:
    """POST a JSON body (or raw bytes)."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return send(live, "POST", path, content, **({"Content-Type": "application/json"} | headers))


def get(live: Listening, path: str, **headers: str) -> Response:
    return send(live, "GET", path, None, **headers)


def raw_post(path: str, content: bytes) -> bytes:
    """A JSON request as it goes over the wire."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n"
    return head.encode() + b"\r\n" + content


def chat(live: LiveServer, **fields: Any) -> Response:
    return post(live, "/v1/chat/completions", {"messages": HELLO} | fields)


def complete(live: LiveServer, prompt: Any = "Hello", **fields: Any) -> Response:
    return post(live, "/v1/completions", {"prompt": prompt} | fields)


def events(response: Response) -> list[Any]:
    """The events of a finished stream; "[DONE]" as it is."""
    assert response.status == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = []
    for block in response.text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def chat_text(found: list[Any], index: int = 0) -> str:
    """What a chat stream's events say for one choice."""
    return "".join(
        choice["delta"].get("content", "")
        for event in found
        if event != "[DONE]"
        for choice in event["choices"]
        if choice["index"] == index
    )


def completion_text(found: list[Any], index: int = 0) -> str:
    """What a completions stream's events say for one choice."""
    return "".join(
        choice["text"]
        for event in found
        if event != "[DONE]"
        for choice in event["choices"]
        if choice["index"] == index
    )


def error_of(response: Response, status: int) -> dict[str, Any]:
    """The error object of a refused request, its shape checked."""
    assert response.status == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


def closed_for(live: LiveServer, reason: str) -> float:
    """How many connections /metrics says were closed for this."""
    prefix = f'penstock_http_connections_closed_total{{reason="{reason}"}} '
    lines = [line for line in get(live, "/metrics").text.splitlines() if line.startswith(prefix)]
    return float(lines[0].removeprefix(prefix)) if lines else 0.0
