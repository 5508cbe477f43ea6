"""The files of keys and certificate, read again while the server runs."""

import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import CapturingLogger

from penstock.config.api_keys import digest
from penstock.ipc.logs import flush_logs
from tests.frontend.http.certificates import make_pair, needs_openssl
from tests.frontend.http_client import get, post
from tests.frontend.live_server import LiveServer, live_server


def write_keys(file: Path, **lines: str) -> None:
    """A file in which each key has the id of the same name."""
    file.write_text("".join(f'[[keys]]\nid = "{k}"\nsha256 = "{digest(k).hex()}"\n{v}\n' for k, v in lines.items()))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    write_keys(file, old="", stays="requests_per_minute = 1")
    return file


@pytest.fixture
def live(checkpoint: Path, sockets: Path, keys: Path) -> Iterator[LiveServer]:
    with live_server(checkpoint, sockets, frontend={"api_keys_file": str(keys)}) as server:
        yield server


def status(live: LiveServer, key: str) -> int:
    return get(live, "/v1/models", Authorization=f"Bearer {key}").status


def generate(live: LiveServer, key: str) -> int:
    body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2}
    return post(live, "/v1/completions", body, Authorization=f"Bearer {key}").status


def test_keys_come_go_and_change(live: LiveServer, keys: Path) -> None:
    assert (status(live, "old"), status(live, "new")) == (200, 401)
    assert [generate(live, "stays") for _ in range(2)] == [200, 429]
    write_keys(keys, new="", stays="requests_per_minute = 2")
    live.do(live.server.reload)
    assert (status(live, "old"), status(live, "new")) == (401, 200)
    assert [generate(live, "stays") for _ in range(2)] == [200, 429], "what was used still counts"


@pytest.mark.parametrize("text", ["[[keys", "", None])
def test_a_bad_file_changes_nothing(
    live: LiveServer, keys: Path, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CapturingLogger()
    monkeypatch.setattr("penstock.frontend.http.server.log", log)
    keys.unlink() if text is None else keys.write_text(text)
    live.do(live.server.reload)
    assert (status(live, "old"), status(live, "")) == (200, 401)
    assert ("error", "API keys not reloaded") in [(call.method_name, *call.args) for call in log.calls]
    assert str(keys) in str(log.calls)


def peer(port: int) -> bytes:
    """The certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as client,
    ):
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        return client.getpeercert(binary_form=True) or b""


@needs_openssl
def test_a_certificate_is_replaced(
    checkpoint: Path, sockets: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    used, other = make_pair(tmp_path / "used"), make_pair(tmp_path / "other")
    with live_server(checkpoint, sockets, frontend=used.options()) as live:
        first = peer(live.port)
        shutil.copy(other.certificate, used.certificate)  # not its key yet
        live.do(live.server.reload)
        assert peer(live.port) == first
        shutil.copy(other.key, used.key)
        live.do(live.server.reload)
        assert peer(live.port) == ssl.PEM_cert_to_DER_cert(other.certificate.read_text()) != first
    flush_logs()
    out, err = capfd.readouterr()
    assert "certificate not reloaded" in out + err
