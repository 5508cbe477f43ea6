"""What a client may do to the HTTP transport: heads and bodies that are endless, malformed, slow or compressed.

Each is answered with the 4xx that it deserves, or its connection is closed; then the check of `after_check.py` holds.
What a body of a legal size may say is in test_requests.py and, against the frontend alone, in tests/frontend.
"""

import gzip
import json
import socket
import time
from contextlib import suppress
from typing import Any

import pytest

from tests.attack.after_check import Victim, tells_nothing
from tests.faults.soak import sized

BODY = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
BOMB = gzip.compress(b" " * (sized(1, 10) << 20))

ROWS: list[tuple[str, list[bytes], tuple[int, ...]]] = [
    ("a1-long-request-line", [b"GET /" + b"x" * (1 << 20) + b" HTTP/1.1\r\n\r\n"], (400, 0)),
    ("a1-long-header", [HEAD, b"X: " + b"x" * (1 << 20), b"\r\n\r\n"], (400, 0)),
    ("a2-many-headers", [HEAD, b"a: b\r\n" * 100_000, b"\r\n"], (400, 0)),
    ("a2-many-trailers", [CHUNKED, b"0\r\n", b"a: b\r\n" * 100_000, b"\r\n"], (400, 0)),
    ("a4-one-byte-chunks", [CHUNKED, b"1\r\n \r\n" * sized(20_000, 1_000_000), b"0\r\n\r\n"], (400,)),
    ("a5-length-and-chunked", [HEAD + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n" + BODY], (400,)),
    ("a5-two-lengths", [HEAD + LENGTH + b"Content-Length: 1\r\n\r\n" + BODY], (400,)),
    ("a5-signed-length", [HEAD + b"Content-Length: +%d\r\n\r\n" % len(BODY) + BODY], (400,)),
    ("a5-unicode-length", [HEAD + "Content-Length: \u0665\r\n\r\n".encode() + BODY], (400,)),
    ("a5-two-hosts", [HEAD + b"Host: y\r\n" + LENGTH + b"\r\n" + BODY], (400,)),
    ("a5-bare-line-feeds", [(HEAD + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + BODY], (400,)),
    ("a5-folded-header", [HEAD + b"X: a\r\n b\r\n" + LENGTH + b"\r\n" + BODY], (400,)),
    ("a5-space-before-colon", [HEAD + LENGTH.replace(b":", b" :") + b"\r\n" + BODY], (400,)),
    ("a5-signed-chunk", [CHUNKED, b"+1\r\nx\r\n0\r\n\r\n"], (400,)),
    ("a5-nul-in-header", [HEAD + b"X: a\x00b\r\n\r\n"], (400,)),
    ("a6-bomb", [HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB], (415,)),
    ("a6-brotli", [HEAD + LENGTH + b"Content-Encoding: br\r\n\r\n" + BODY], (415,)),
    ("a7-length-too-large", [HEAD + b"Content-Length: 99999999999\r\n\r\n"], (413,)),
    ("a7-chunks-too-large", [CHUNKED, (b"100000\r\n" + b" " * (1 << 20) + b"\r\n") * 9], (413, 0)),
    ("a10-no-type", [b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + LENGTH + b"\r\n" + BODY], (415,)),
    ("a10-broken-type", [HEAD.replace(b"/json", b"/json; a*0*") + LENGTH + b"\r\n" + BODY], (415,)),
    ("a10-long-type", [HEAD.replace(b"/json", b"/json; " + b"(a)" * 2500) + LENGTH + b"\r\n" + BODY], (415,)),
]


def status(answer: bytes) -> int:
    """The status of a raw answer; 0 if the connection was closed without one."""
    return int(answer.split()[1]) if answer.startswith(b"HTTP/") else 0


@pytest.mark.parametrize(("row", "pieces", "expected"), ROWS, ids=[row[0] for row in ROWS])
def test_bytes_that_break_other_servers(
    server: Victim, row: str, pieces: list[bytes], expected: tuple[int, ...]
) -> None:
    answer = server.throw(*pieces)
    assert status(answer) in expected, answer[:200]
    assert tells_nothing(answer.decode(errors="replace"), server)


def test_a1_one_byte_segments(server: Victim) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for _ in range(20_000):
                connection.send(b"x")
            answer = connection.recv(1024)
        except ConnectionError:
            answer = b""
    assert status(answer) in (400, 0)


def test_a3_pipelined_requests_that_nobody_reads(server: Victim) -> None:
    frontend = server.processes["penstock-frontend-0"]
    before = frontend.memory_info().rss
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=1) as connection:
        with suppress(TimeoutError, ConnectionError):
            connection.sendall(request * sized(100_000, 1_000_000))
        assert frontend.memory_info().rss - before < 16 << 20
    assert server.get("/health") is not None


def test_a9_connections_that_drip(server: Victim) -> None:
    held = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(sized(200, 2000))]
    try:
        for i, connection in enumerate(held):
            connection.sendall(HEAD[:20] if i % 2 else HEAD + LENGTH + b"\r\n{")
        began = time.monotonic()
        for _ in range(20):
            assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
        assert all(connection.recv(1) == b"" for connection in held)
        assert time.monotonic() - began < 60
    finally:
        for connection in held:
            connection.close()


@pytest.mark.parametrize("row", ["a11-deep", "d5-many-messages", "a2-broken-body"])
def test_repeated(server: Victim, row: str) -> None:
    """What one request leaves behind, a hundred show."""
    frontend = server.processes["penstock-frontend-0"]
    num, sizes = sized(12, 100), []
    for _ in range(2):
        for _ in range(num):
            match row:
                case "a11-deep":
                    body: Any = b'{"prompt":' + b"[" * 1_000_000 + b"}"
                    assert server.post("/v1/completions", body)[0] == 400
                case "d5-many-messages":
                    body = {"messages": [{"role": "user", "content": "x"}] * 100_000}
                    assert server.post("/v1/chat/completions", body)[0] == 400
                case _:
                    assert status(server.throw(CHUNKED, b"100000\r\n" + b" " * (1 << 20) + b"x")) in (400, 0)
        sizes.append(frontend.memory_info().rss)
    assert sizes[1] - sizes[0] < 32 << 20


def test_a12_ids_and_names_that_would_forge_log_lines(server: Victim) -> None:
    answer = server.throw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: " + b"x" * 5000 + b"\r\n\r\n")
    assert b"x" * 200 not in answer
    num_lines = len(server.log.read_text().splitlines())
    for name in ("a\r\n\x1b[31mforged", "a\u2028forged", "b" * 100_000):
        assert server.post("/v1/completions", {"model": name, "prompt": "x", "user": "\r\nforged"})[0] == 404
    deadline = time.monotonic() + 60  # a line is written after its answer
    while len(said := server.log.read_text().splitlines()[num_lines:]) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(said) == 3
    assert not any("\x1b" in line or "b" * 300 in line or not line.startswith("{") for line in said)
