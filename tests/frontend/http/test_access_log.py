"""The access log: a line for each request, combined or JSON, opened anew when it was moved away."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config, ConfigError, FrontendOptions
from penstock.config.options import validate
from penstock.frontend.exchange.access_log import AccessLog
from tests.frontend.http_client import chat, get
from tests.frontend.live_server import LiveServer, live_server

COMBINED = re.compile(
    r'(\S+) - (\S+) \[([^]]+)\] "((?:[^"\\]|\\.)*)" (\d{3}) (\d+) "((?:[^"\\]|\\.)*)" "((?:[^"\\]|\\.)*)"'
)


def logged(path: Path, live: LiveServer, count: int) -> list[str]:
    """The first lines, once they are there."""
    live.wait_until(lambda: path.exists() and path.read_text().count("\n") >= count)
    return path.read_text().splitlines()


def server(checkpoint: Path, sockets: Path, path: Path) -> Any:
    return live_server(checkpoint, sockets, frontend={"access_log": str(path)})


def test_combined(checkpoint: Path, sockets: Path, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    with server(checkpoint, sockets, path) as live:
        answer = get(live, "/health?a=%22b", **{"User-Agent": 'agent "1"', "Referer": "http://a/"})
        stream = chat(live, stream=True)
        get(live, "/nowhere")
        lines = logged(path, live, 3)
        found = [match.groups() for match in map(COMBINED.fullmatch, lines) if match]
    assert len(found) == 3
    assert found[0][0] == "127.0.0.1"
    assert found[0][3:] == (
        "GET /health?a=%22b HTTP/1.1", "200", str(len(answer.content)), "http://a/", 'agent \\"1\\"',
    )  # fmt: skip
    assert found[1][3:6] == ("POST /v1/chat/completions HTTP/1.1", "200", str(len(stream.content)))
    assert found[2][3:5] == ("GET /nowhere HTTP/1.1", "404")
    assert re.fullmatch(r"\d\d/\w{3}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4}", found[0][2])


def test_json(checkpoint: Path, sockets: Path, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    with server(checkpoint, sockets, path) as live:
        answer = chat(live)
        [line] = map(json.loads, logged(path, live, 1))
    usage = answer.json()["usage"]
    assert (line["method"], line["path"], line["protocol"]) == ("POST", "/v1/chat/completions", "HTTP/1.1")
    assert (line["status"], line["bytes"], line["model"]) == (200, len(answer.content), "test/model")
    assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert line["request_id"] == answer.headers["x-request-id"]
    assert line["seconds"] > 0


def test_text_that_is_not_utf8(checkpoint: Path, sockets: Path, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    with server(checkpoint, sockets, path) as live:
        with socket.create_connection(("127.0.0.1", live.port), 60) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nUser-Agent: caf\xe9\r\n")
            client.sendall(b"Referer: \xff\r\nConnection: close\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
        [line] = map(json.loads, logged(path, live, 1))
    assert (line["user_agent"], line["referer"], line["status"]) == ("caf?", "?", 200)


def test_a_client_forges_no_fields(checkpoint: Path, sockets: Path, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    with server(checkpoint, sockets, path) as live:
        get(live, "/health", **{"Referer": "a\\", "User-Agent": '\\" 200 1 "b'})
        [line] = logged(path, live, 1)
    found = COMBINED.fullmatch(line)
    assert found is not None
    assert found[7] == "a\\\\"
    assert found[8] == '\\\\\\" 200 1 \\"b'


def test_it_is_opened_anew(checkpoint: Path, sockets: Path, tmp_path: Path) -> None:
    path, moved = tmp_path / "access.log", tmp_path / "access.log.1"
    with server(checkpoint, sockets, path) as live:
        get(live, "/health")
        assert "/health" in logged(path, live, 1)[0]
        path.rename(moved)
        live.do(live.server.reload)
        get(live, "/ready")
        assert "/ready" in logged(path, live, 1)[0]
        assert len(moved.read_text().splitlines()) == 1


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        validate(Config(frontend=FrontendOptions(access_log=str(tmp_path / "none" / "access.log"))))
    with pytest.raises(ConfigError, match=r"--access-log .* cannot be opened"):
        AccessLog(str(tmp_path), is_json=False)
