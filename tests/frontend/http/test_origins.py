"""Pages in browsers cannot drive a server on their own machine; and heads that HTTP does not allow are refused."""

import socket
from pathlib import Path

import pytest

from penstock.config.api_keys import digest
from tests.frontend.http_client import complete, error_of, get, post, send
from tests.frontend.live_server import LiveServer, live_server

BODY = b'{"prompt": "Hello", "max_tokens": 1}'


def throw(live: LiveServer, head: str, body: bytes = b"") -> bytes:
    """All that is answered to these bytes until the connection ends."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as client:
        client.sendall(head.replace("\n", "\r\n").encode() + b"\r\n" + body)
        answer = b""
        while received := client.recv(4096):
            answer += received
    return answer


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "127.8.0.1", "10.0.0.7:8000", "api.localhost"]
)
def test_hosts_that_no_page_can_take(live: LiveServer, host: str) -> None:
    assert complete(live).status == 200
    assert post(live, "/v1/completions", BODY, Host=host).status == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8000", "127.0.0.1.nip.io"])
def test_names_that_are_somebody_elses(live: LiveServer, host: str) -> None:
    error = error_of(post(live, "/v1/completions", BODY, Host=host), 403)
    assert error["code"] == "host_not_allowed"
    assert "--allowed-hosts" in error["message"]
    for path in ("/v1/models", "/metrics", "/nowhere"):
        assert error_of(get(live, path, Host=host), 403)["code"] == "host_not_allowed"
    assert get(live, "/health", Host=host).status == 200  # probes have names of their own


def test_names_are_allowed(checkpoint: Path, sockets: Path, tmp_path: Path) -> None:
    with live_server(checkpoint, sockets, frontend={"allowed_hosts": ("Chat.example.org",)}) as live:
        assert get(live, "/v1/models", Host="chat.example.org:443").status == 200
        assert get(live, "/v1/models", Host="evil.example").status == 403
    with live_server(checkpoint, sockets, frontend={"allowed_hosts": ("*",)}) as live:
        assert get(live, "/v1/models", Host="evil.example").status == 200
    with live_server(checkpoint, sockets, frontend={"host": "0.0.0.0", "insecure_bind": True}) as live:
        assert get(live, "/v1/models", Host="gateway.example.org").status == 200
    opened = {"host": "0.0.0.0", "insecure_bind": True, "allowed_hosts": ("localhost",)}  # as in a container
    with live_server(checkpoint, sockets, frontend=opened) as live:
        assert get(live, "/v1/models", Host="gateway.example.org").status == 403
        assert get(live, "/v1/models", Host="192.168.0.7:8000").status == 200
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nid = "a"\nsha256 = "{digest("a").hex()}"\nscopes = ["infer"]\n')
    with live_server(checkpoint, sockets, frontend={"api_keys_file": str(keys)}) as live:
        assert get(live, "/v1/models", Host="evil.example", Authorization="Bearer a").status == 200
        assert get(live, "/v1/models", Host="evil.example").status == 401


def test_a_page_cannot_act(checkpoint: Path, sockets: Path) -> None:
    with live_server(checkpoint, sockets, frontend={"cors_origins": ("https://chat.example.org",)}) as live:
        for origin in ("http://evil.example", "null", "https://localhost:1"):
            error = error_of(send(live, "POST", "/reset_prefix_cache", Origin=origin), 403)
            assert error["code"] == "origin_not_allowed"
        for origin in ("https://chat.example.org", f"http://127.0.0.1:{live.port}"):
            assert send(live, "POST", "/reset_prefix_cache", Origin=origin).status == 200
        assert send(live, "POST", "/reset_prefix_cache").status == 200  # curl
        # What has a body is asked for first by a browser, as its type is JSON: see test_cors.py.
        text = send(
            live, "POST", "/v1/completions", BODY, Origin="http://evil.example", **{"Content-Type": "text/plain"}
        )
        assert text.status == 415


@pytest.mark.parametrize("host", ["Host: x/health?\n", "Host: [::1\n", "Host: a b\n", "Host:\n", "Host: a@b\n", ""])
def test_hosts_that_are_none(live: LiveServer, host: str) -> None:
    for path in ("/v1/models", "/health", "/nowhere"):
        answer = throw(live, f"GET {path} HTTP/1.1\n{host}")
        assert answer.split()[1] == b"400", answer
        assert b"malformed_" in answer


def test_a_client_of_long_ago(live: LiveServer) -> None:
    assert throw(live, "GET /v1/models HTTP/1.0\n").startswith(b"HTTP/1.0 200")


CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
POST = "POST /v1/completions HTTP/%s\nHost: localhost\nContent-Type: application/json\nTransfer-Encoding: %s\n"


@pytest.mark.parametrize("coding", ["gzip, chunked", "identity, chunked"])
def test_codings_that_are_not_supported(live: LiveServer, coding: str) -> None:
    answer = throw(live, POST % ("1.1", coding), CHUNKED)  # it ends: the connection is closed
    assert answer.startswith(b"HTTP/1.1 501"), answer
    assert answer.count(b"HTTP/1.1") == 1


def test_chunks_in_http_1_0(live: LiveServer) -> None:
    answer = throw(live, POST % ("1.0", "chunked"), CHUNKED)
    assert answer.split()[1] == b"400", answer
