"""Clients that send too slowly, too much or too many: their connections end, everyone else's do not."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.frontend.http_client import closed_for, complete, get, raw_post
from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.probed_server import probed_server

BODY = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode()


@pytest.fixture
def strict(checkpoint: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr("penstock.frontend.http.server.MAX_CONNECTIONS", 4)
    limits = {"head_timeout": 0.5, "body_timeout": 2.0}
    with live_server(checkpoint, sockets, frontend=limits) as live:
        yield live


def connect(live: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=60)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for what the server does when it comes to it."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_served(live: LiveServer) -> bool:
    with suppress(ConnectionError):  # closed before the whole request was sent
        return complete(live).status == 200
    return False


def test_a_head_has_a_deadline_however_it_drips(strict: LiveServer) -> None:
    with closing(connect(strict)) as silent, closing(connect(strict)) as dripping:
        dripping.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        deadline = time.monotonic() + 60
        with suppress(ConnectionError):  # once it is closed over there
            while time.monotonic() < deadline:
                dripping.sendall(b"X")
                time.sleep(0.1)
        assert time.monotonic() < deadline
        assert silent.recv(1) == b""
    assert closed_for(strict, "head_timeout") == 2


def test_the_next_head_of_a_connection_too(strict: LiveServer) -> None:
    with closing(connect(strict)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        time.sleep(1.2)  # idle is no offence
        client.sendall(b"GET /hea")
        assert client.recv(1) == b""


def test_a_body_must_go_on(strict: LiveServer) -> None:
    request = raw_post("/v1/completions", BODY)
    with closing(connect(strict)) as stuck, closing(connect(strict)) as slow:
        stuck.sendall(request[:-1])
        for i in range(len(request) - 12, len(request)):  # longer than the timeout, but never silent for so long
            slow.sendall(request[i : i + 1] if i > len(request) - 12 else request[: i + 1])
            time.sleep(0.2)
        assert slow.recv(4096).startswith(b"HTTP/1.1 200")
        assert stuck.recv(1) == b""
    assert closed_for(strict, "body_timeout") == 1


def test_an_answer_may_take_longer(strict: LiveServer) -> None:
    strict.says("one two three four five six", delay=0.4)
    assert complete(strict, max_tokens=20).status == 200
    assert closed_for(strict, "head_timeout") == 0


def test_one_connection_too_many(strict: LiveServer) -> None:
    held: list[socket.socket] = []
    try:
        for _ in range(4):
            held.append(connect(strict))
            held[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert held[-1].recv(4096).startswith(b"HTTP/1.1 200")
        with closing(connect(strict)) as fifth:
            answer = fifth.recv(4096)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"Retry-After" in answer
            assert b"4 connections are open" in answer
        held.pop().close()
        wait_for(lambda: is_served(strict))
    finally:
        for client in held:
            client.close()


def test_what_is_no_http_gets_the_usual_error_body(strict: LiveServer) -> None:
    with closing(connect(strict)) as client:
        client.sendall(b"\x16\x03\x01 secret-of-mine\r\n\r\n")
        answer = client.recv(4096)
    assert answer.startswith(b"HTTP/1.0 400")
    assert b'"code":"malformed_body"' in answer
    assert b"secret" not in answer


@pytest.mark.parametrize(
    "rest",
    [b"zz\r\n", b"0\r\n" + b"a: b\r\n" * 1000 + b"\r\n", b"0\r\na: " + b"b" * 100_000 + b"\r\n\r\n"],
    ids=["no-chunk", "many-trailers", "a-long-trailer"],
)
def test_a_body_that_turns_out_to_be_no_http_is_answered_and_closed(strict: LiveServer, rest: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\n"
    with closing(connect(strict)) as client:
        client.sendall(head + b"\r\n%x\r\n%s\r\n" % (len(BODY), BODY))
        time.sleep(0.2)  # so that the request has begun
        client.sendall(rest)
        answer = b""
        while received := client.recv(4096):
            answer += received
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b'"code":"malformed_body"') == 1
    assert closed_for(strict, "body_timeout") == 0


def test_bodies_that_take_their_time_are_bounded_together(strict: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.http.app.MAX_HELD_BODIES", 2)
    size = strict.server.service.max_body_bytes
    almost = raw_post("/v1/completions", b" " * size)[:-1]
    with closing(connect(strict)) as first, closing(connect(strict)) as second, closing(connect(strict)) as third:
        first.sendall(almost)
        second.sendall(almost)
        time.sleep(0.3)  # so that the third is the one too many
        third.sendall(almost)
        answer = third.recv(4096)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"too many large request bodies" in answer
        assert b"Retry-After" in answer
        first.sendall(b" ")
        assert first.recv(4096).startswith(b"HTTP/1.1 400")  # it was read, and is no JSON
    assert complete(strict).status == 200


def test_connections_keep_within_the_limit_of_open_files(checkpoint: Path, sockets: Path) -> None:
    with probed_server(checkpoint, sockets, open_files=300) as server:
        held = []
        try:
            for _ in range(250):
                held.append(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            wait_for(lambda: sum(map(_has_answer, held)) > 50)
            time.sleep(0.5)
            refused = [client for client in held if _has_answer(client)]
            assert len(refused) < 100  # 172 are taken
            assert refused[0].recv(100).startswith(b"HTTP/1.1 503")
        finally:
            for client in held:
                client.close()
        wait_for(lambda: get(server, "/v1/models").status == 200)


def _has_answer(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
