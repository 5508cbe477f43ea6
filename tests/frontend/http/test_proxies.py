"""Clients behind reverse proxies: whom the server believes about them, and what it takes for the client otherwise."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest

from penstock.config import Config, ConfigError, FrontendOptions
from penstock.config.options import validate
from penstock.frontend.http.proxies import MAX_HOPS, PreambleError, TrustedProxies, may_begin_preamble, read_preamble
from tests.frontend.http.test_asgi import Client, mounted
from tests.frontend.http_client import get
from tests.frontend.live_server import LiveServer, live_server

PROXIES = TrustedProxies(("10.0.0.0/8", "fd00::/8", "192.0.2.1"))

V1 = b"PROXY TCP4 203.0.113.9 10.0.0.1 4711 80\r\n"
V2_SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
ASK = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def v2(client: str, command: int = 0x21) -> bytes:
    family = socket.AF_INET6 if ":" in client else socket.AF_INET
    addresses = socket.inet_pton(family, client) * 2 + bytes((0x12, 0x67, 0, 80))
    kind = 0x21 if ":" in client else 0x11
    return V2_SIGNATURE + bytes((command, kind)) + len(addresses).to_bytes(2) + addresses


@pytest.mark.parametrize(
    ("peer", "listed", "client"),
    [
        ("203.0.113.9", ["1.1.1.1"], "203.0.113.9"),  # anybody may write a header
        ("10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["1.1.1.1, 203.0.113.9"], "203.0.113.9"),  # what the client wrote itself
        ("10.0.0.1", ["1.1.1.1, 203.0.113.9, 10.2.3.4,fd00::1"], "203.0.113.9"),
        ("10.0.0.1", ["1.1.1.1", "203.0.113.9", "10.2.3.4"], "203.0.113.9"),
        ("::ffff:10.0.0.1", ["::ffff:203.0.113.9"], "203.0.113.9"),
        ("fd00::1%eth0", ["[2001:db8::1]:4711"], "2001:db8::1"),
        ("192.0.2.1", ["203.0.113.9:4711"], "203.0.113.9"),
        ("192.0.2.2", ["203.0.113.9"], "192.0.2.2"),
        ("10.0.0.1", ["10.0.0.3, 10.0.0.2"], "10.0.0.3"),  # a client of the proxies' own network
        ("10.0.0.1", ["1.1.1.1, unknown, 10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", ["1.1.1.1, nonsense"], "10.0.0.1"),
        ("10.0.0.1", [""], "10.0.0.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["1.1.1.1," + "10.0.0.2," * MAX_HOPS + "10.0.0.3"], "10.0.0.2"),
        ("", ["1.1.1.1"], ""),
    ],
)
def test_the_client_is_the_last_address_that_is_no_proxy(peer: str, listed: Sequence[str], client: str) -> None:
    assert PROXIES.client(peer, {"x-forwarded-for": listed} if listed else {}) == client
    said = [",".join(_element(hop.strip()) for hop in line.split(",")) for line in listed]
    assert PROXIES.client(peer, {"forwarded": said} if said else {}) == client
    assert TrustedProxies(()).client(peer, {"x-forwarded-for": listed, "forwarded": said}) == peer


def _element(address: str) -> str:
    return f'proto=http; For="{address if ":" not in address or "." in address else _bracketed(address)}";by=_x'


def _bracketed(address: str) -> str:
    return address if address.startswith("[") else f"[{address}]"


@pytest.mark.parametrize(
    ("forwarded", "listed", "client"),
    [
        ("for=203.0.113.9", "203.0.113.9", "203.0.113.9"),
        ("for=1.1.1.1", "203.0.113.9", "10.0.0.1"),  # one of them is the client's own, and nobody knows which
        ("for=1.1.1.1", "10.0.0.2", "10.0.0.1"),
        ('for=1.1.1.1;host="a, for=203.0.113.9', None, "203.0.113.9"),
        ('host=a;for=203.0.113.9;x="";for=1.1.1.1', None, "10.0.0.1"),
        ("by=203.0.113.9", None, "10.0.0.1"),
        ("for=_hidden", None, "10.0.0.1"),
    ],
)
def test_headers_that_contradict_themselves_or_each_other(forwarded: str, listed: str | None, client: str) -> None:
    headers = {"forwarded": [forwarded]} | ({} if listed is None else {"x-forwarded-for": [listed]})
    assert PROXIES.client("10.0.0.1", headers) == client


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("proxy.example.org", "not a name"),
        ("10.0.0.7/8", "the network is 10.0.0.0/8, or the address 10.0.0.7"),
        ("10.0.0.0/33", "it must be an IP address or a network"),
        ("*", "it must be an IP address or a network"),
    ],
)
def test_what_is_no_network_is_refused(given: str, why: str) -> None:
    with pytest.raises(ConfigError, match="--trusted-proxies") as caught:
        validate(Config(frontend=FrontendOptions(trusted_proxies=("10.0.0.0/8", given))))
    assert why in str(caught.value)
    validate(Config(frontend=FrontendOptions(trusted_proxies=("10.0.0.7", "fd00::/8", "0.0.0.0/0"))))


@pytest.mark.parametrize(
    ("data", "client"),
    [
        (V1, "203.0.113.9"),
        (b"PROXY TCP6 2001:db8::1 ::1 1 2\r\n", "2001:db8::1"),
        (b"PROXY UNKNOWN\r\n", ""),
        (b"PROXY UNKNOWN ffff:f...f:ffff 1 2 3\r\n", ""),
        (v2("203.0.113.9"), "203.0.113.9"),
        (v2("2001:db8::1"), "2001:db8::1"),
        (v2("203.0.113.9", command=0x20), ""),
        (V2_SIGNATURE + bytes((0x21, 0x31, 0, 2)) + b"/x", ""),  # a Unix socket's name
        (V2_SIGNATURE + bytes((0x20, 0, 0, 0)), ""),
    ],
)
def test_the_proxy_protocol_is_read_however_it_is_cut(data: bytes, client: str) -> None:
    for end in range(1, len(data)):
        assert may_begin_preamble(data[:end])
        assert read_preamble(data[:end]) is None
    assert read_preamble(data + ASK) == (client, len(data))


@pytest.mark.parametrize(
    "data",
    [
        b"PROXY TCP4 203.0.113.9 10.0.0.1 4711\r\n",
        b"PROXY TCP4 2001:db8::1 ::1 1 2\r\n",
        b"PROXY TCP4 \xff b 1 2\r\n",
        b"PROXY TCP4 " + b"1" * 200,
        V2_SIGNATURE + bytes((0x31, 0x11, 0, 12)) + bytes(12),
        V2_SIGNATURE + bytes((0x21, 0x11, 0, 7)) + bytes(7),
        V2_SIGNATURE + bytes((0x21, 0x11, 0xFF, 0xFF)),
    ],
)
def test_what_is_no_proxy_protocol_is_refused(data: bytes) -> None:
    with pytest.raises(PreambleError):
        read_preamble(data)


@pytest.mark.parametrize("data", [b"POST / HTTP/1.1\r\n", b"PROXY / HTTP/1.1\r\n", b"\r\n\r\nGET / HTTP/1.1\r\n", b"G"])
def test_requests_are_no_proxy_protocol(data: bytes) -> None:
    assert not may_begin_preamble(data)


@pytest.fixture(scope="module")
def trusting(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Path]]:
    """A server that trusts 127.0.0.1 alone, and its access log; it listens on all addresses."""
    log = tmp_path_factory.mktemp("log") / "access.jsonl"
    options = {"trusted_proxies": ("127.0.0.1",), "access_log": str(log)}
    with live_server(checkpoint, tmp_path_factory.mktemp("s"), frontend=options) as live:
        yield live, log


def clients(log: Path, num: int) -> list[str]:
    """The clients of the last lines of an access log, once so many new ones are written."""
    deadline = time.monotonic() + 60
    while len(lines := log.read_text().splitlines() if log.exists() else []) < num:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    log.write_text("")
    return [json.loads(line)["client"] for line in lines]


def talk(live: LiveServer, *pieces: bytes, source: str = "127.0.0.1") -> bytes:
    """Send these one by one, from this address, and return all that comes back."""
    with closing(socket.create_connection(("127.0.0.1", live.port), timeout=60, source_address=(source, 0))) as client:
        for piece in pieces:
            client.sendall(piece)
            time.sleep(0.02)
        answer = b""
        with suppress(ConnectionError):
            while more := client.recv(1 << 16):
                answer += more
        return answer


def test_a_trusted_proxy_names_the_client(trusting: tuple[LiveServer, Path]) -> None:
    live, log = trusting
    get(live, "/v1/models", **{"X-Forwarded-For": "1.1.1.1, 203.0.113.9"})
    get(live, "/v1/models", Forwarded='for="[2001:db8::1]:4711"')
    assert clients(log, 2) == ["203.0.113.9", "2001:db8::1"]
    ask = ASK.replace(b"/health", b"/v1/models")
    for preamble in (V1, v2("203.0.113.9")):
        assert talk(live, preamble + ask).startswith(b"HTTP/1.1 200")
        assert talk(live, preamble[:3], preamble[3:20], preamble[20:], ask).startswith(b"HTTP/1.1 200")
    assert talk(live, v2("10.0.0.1", command=0x20) + ask).startswith(b"HTTP/1.1 200")
    named = ask.replace(b"Host:", b"X-Forwarded-For: 198.51.100.1\r\nHost:")
    assert talk(live, v2("127.0.0.1") + named).startswith(b"HTTP/1.1 200")
    assert talk(live, v2("203.0.113.9") + named).startswith(b"HTTP/1.1 200")
    assert clients(log, 7) == [*["203.0.113.9"] * 4, "127.0.0.1", "198.51.100.1", "203.0.113.9"]


def test_nobody_else_does(trusting: tuple[LiveServer, Path]) -> None:
    live, log = trusting
    ask = ASK.replace(b"/health", b"/v1/models").replace(b"Host:", b"X-Forwarded-For: 198.51.100.1\r\nHost:")
    assert talk(live, ask, source="127.0.0.2").startswith(b"HTTP/1.1 200")
    assert clients(log, 1) == ["127.0.0.2"]
    for preamble in (V1, v2("203.0.113.9")):
        answer = talk(live, preamble, source="127.0.0.2")
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b"the PROXY protocol is for --trusted-proxies only" in answer
    assert b"the PROXY protocol cannot be read" in talk(live, b"PROXY TCP4 x y 1 2\r\n")


def test_the_client_is_the_tenant(trusting: tuple[LiveServer, Path]) -> None:
    live, log = trusting
    body = b'{"prompt": "Hello", "max_tokens": 1}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    head += b"Content-Length: %d\r\n" % len(body)
    for client in (b"203.0.113.9", b"203.0.113.10"):
        assert talk(live, head + b"X-Forwarded-For: " + client + b"\r\n\r\n" + body).startswith(b"HTTP/1.1 200")
    assert [request.tenant for request in live.scheduler.added] == ["203.0.113.9", "203.0.113.10"]
    assert clients(log, 2) == ["203.0.113.9", "203.0.113.10"]
    json_body = {"Content-Type": "application/json", "X-Forwarded-For": "203.0.113.11"}
    assert mounted(live, Client("POST", "/v1/completions", body, **json_body)).status == 200
    assert clients(log, 1) == [live.scheduler.added[-1].tenant] == ["203.0.113.11"]


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_our_nginx_tells_clients_apart(trusting: tuple[LiveServer, Path], tmp_path: Path) -> None:
    live, log = trusting
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = (Path(__file__).parents[3] / "deploy" / "nginx" / "penstock.conf").read_text()
    ours = ours.replace("listen 8080", f"listen 127.0.0.1:{port}").replace("http://frontend:8000", live.url)
    paths = " ".join(f"{name}_temp_path {tmp_path};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"daemon off; pid {tmp_path}/pid; error_log stderr; events {{}} http {{ access_log off; {paths}\n{ours} }}"
    )
    with subprocess.Popen(["nginx", "-c", str(config), "-e", "stderr"]) as nginx:
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            ask = ASK.replace(b"/health", b"/v1/models")
            forged = ask.replace(b"Host:", b"X-Forwarded-For: 1.1.1.1\r\nForwarded: for=1.1.1.1\r\nHost:")
            for source in ("127.0.0.2", "127.0.0.3"):
                for request in (ask, forged):
                    with closing(socket.create_connection(("127.0.0.1", port), 60, (source, 0))) as client:
                        client.sendall(request)
                        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
            assert clients(log, 4) == ["127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.3"]
        finally:
            nginx.terminate()
