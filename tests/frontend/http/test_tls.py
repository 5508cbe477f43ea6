"""TLS by two files: what is served, and which files are refused."""

import http.client
import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from penstock.config import ConfigError, FrontendOptions
from penstock.config.listening import check_listening
from penstock.ipc.logs import flush_logs
from tests.frontend.fake_scheduler import Script
from tests.frontend.http.certificates import Pair, make_pair, needs_openssl
from tests.frontend.http_client import raw_post
from tests.frontend.live_server import LiveServer, live_server

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def live(checkpoint: Path, sockets: Path, pair: Pair) -> Iterator[LiveServer]:
    options = {"head_timeout": 1.0, "slow_reader_timeout": 0.3, "trusted_proxies": ("127.0.0.1",)}
    with live_server(checkpoint, sockets, max_model_len=1_000_000, frontend=pair.options() | options) as server:
        yield server


def connect(live: LiveServer, pair: Pair) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", live.port), timeout=60)
    return ssl.create_default_context(cafile=str(pair.certificate)).wrap_socket(plain, server_hostname="localhost")


def test_requests_are_served(live: LiveServer, pair: Pair) -> None:
    live.says("Good day")
    with closing(connect(live, pair)) as client:
        assert client.version() in ("TLSv1.2", "TLSv1.3")
        for path in ("/health", "/ready"):  # two requests on one connection
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        client.sendall(raw_post("/v1/completions", b'{"prompt": "Hello", "stream": true}'))
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += client.recv(4096)
        assert b"data: [DONE]" in answer


def test_a_client_cannot_speak_as_a_proxy(live: LiveServer, pair: Pair) -> None:
    """What a proxy passes on without reading it was written by the client."""
    with closing(connect(live, pair)) as client:
        client.sendall(b"PROXY TCP4 203.0.113.9 10.0.0.1 4711 80\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.0 400 ")


def test_what_is_no_tls_gets_nothing(live: LiveServer, capfd: pytest.CaptureFixture[str]) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)) as plain:
        plain.request("GET", "/health")
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            plain.getresponse()
    flush_logs()
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err


def test_old_tls_is_refused(live: LiveServer, pair: Pair) -> None:
    context = ssl.create_default_context(cafile=str(pair.certificate))
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    plain = socket.create_connection(("127.0.0.1", live.port), timeout=60)
    with plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain, server_hostname="localhost")


def test_a_handshake_has_a_deadline(live: LiveServer) -> None:
    by_itself = 60
    address = ("127.0.0.1", live.port)
    with closing(socket.create_connection(address, timeout=by_itself - 10)) as silent, suppress(ConnectionError):
        assert silent.recv(1) == b""


def test_who_never_reads_is_closed(live: LiveServer, pair: Pair) -> None:
    ids = [5 + i % 300 for i in range(60_000)]
    live.plays(lambda request, i: Script(ids, per_step=20, delay=0.001))
    with closing(connect(live, pair)) as client:
        client.sendall(raw_post("/v1/completions", b'{"prompt": "x", "stream": true, "max_tokens": 60000}'))
        live.wait_until(lambda: live.scheduler.num_paused == 1, 20)
        live.wait_until(lambda: len(live.scheduler.aborted) == 1, 20)
        live.wait_until(lambda: len(live.server.service.generations) == 0)


def test_files_that_cannot_be_used(pair: Pair, tmp_path: Path) -> None:
    other = make_pair(tmp_path / "other")
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", str(pair.key), "-aes128", "-passout", "pass:word", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    nothing = str(tmp_path / "none.pem")
    for changes, words in (
        ({"tls_key": ""}, ("--tls-key is missing",)),
        ({"tls_certificate": ""}, ("--tls-certificate is missing",)),
        ({"tls_key": nothing}, ("--tls-key", nothing, "No such file")),
        ({"tls_certificate": nothing}, ("--tls-certificate", nothing, "No such file")),
        ({"tls_key": str(other.key)}, (str(pair.certificate), str(other.key), "do not belong together")),
        ({"tls_key": str(pair.certificate)}, ("must hold a PEM",)),
        ({"tls_certificate": os.devnull}, ("must hold a PEM",)),
        ({"tls_key": str(locked)}, (str(locked), "without a password")),
    ):
        with pytest.raises(ConfigError) as refused:
            check_listening(FrontendOptions(**(pair.options() | changes)), {})
        assert all(word in str(refused.value) for word in words), str(refused.value)
    check_listening(FrontendOptions(**pair.options()), {})
