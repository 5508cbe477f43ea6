"""`penstock top`: figures from what a server tells, once and in a terminal."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.figures import Look, Span, number, quantile, read_look, seconds
from penstock.cli.top import View, bar, cut, main, plain
from penstock.config.api_keys import digest
from penstock.config.sizes import size
from tests.frontend.live_server import live_server

WAIT_SECONDS = 60.0
METRICS = """
penstock_num_rows 8
penstock_num_requests_running 2
penstock_num_requests_waiting 3
penstock_num_requests_waiting_by_reason{reason="no free row"} 2
penstock_num_requests_waiting_by_reason{reason="no free pages"} 1
penstock_num_pages 100
penstock_num_used_pages 50
penstock_host_pages{state="free"} 30
penstock_host_pages{state="cached"} 10
penstock_host_copied_bytes_total{direction="to_host"} 2048
"""
REQUEST = {"id": "a\x1b]0;b", "state": "waiting", "age_seconds": 1.5, "reason": "no free row", "prompt_tokens": 7}
ENGINES: list[dict[str, Any]] = [
    {"id": "0", "state": "ready", "running": 2, "waiting": 3, "paused": 0},
    {"id": "1", "state": "not ready", "reason": "no worker", "running": 0, "waiting": 0, "paused": 0},
]


def look(text: str, at: float) -> Look:
    return Look(read_look(text).samples, at)


def test_rates_and_sums() -> None:
    before = look('penstock_steps_total{engine="0"} 10\npenstock_steps_total{engine="1"} 30\n', 5.0)
    after = look('penstock_steps_total{engine="0"} 20\npenstock_steps_total{engine="1"} 50\n', 7.0)
    span = Span(before, after)
    assert (span.count("steps_total"), span.rate("steps_total")) == (30, 15)
    assert span.by_label("steps_total", "engine") == {"0": 10, "1": 20}
    assert after.by("steps_total", "engine") == {"0": 20, "1": 50}
    restarted = Span(after, look('penstock_steps_total{engine="0"} 4\n', 8.0))
    assert restarted.count("steps_total") == 4


def test_percentiles() -> None:
    text = "".join(
        f'penstock_x_bucket{{le="{bound}"}} {count}\n' for bound, count in (("1", 50), ("2", 90), ("+Inf", 100))
    )
    span = Span(Look({}, 0.0), look(text, 1.0))
    assert span.percentiles("x", 0.25, 0.5, 0.9, 0.99) == (0.5, 1.0, 2.0, 2.0)
    assert span.percentiles("y", 0.5) == (None,)
    assert quantile({1.0: 0, 2.0: 0}, 0.5) is None
    assert quantile({1.0: 0, 2.0: 4, float("inf"): 4}, 0.5) == 1.5


def test_figures_for_people() -> None:
    assert [seconds(value) for value in (None, 0.0012, 0.5, 12.34, 6000)] == [
        "-",
        "1.2 ms",
        "500 ms",
        "12.3 s",
        "100 min",
    ]
    assert [number(value) for value in (0, 0.25, 12.6, 99999, 2.5e6)] == ["0", "0.2", "13", "99,999", "2.5M"]
    assert [size(value) for value in (5, 2048, 3 << 30)] == ["5 B", "2.0 KiB", "3.0 GiB"]
    assert bar(1, 2).count("#") == bar(1, 2).count(".") == 15
    assert bar(1, 0).count("#") == 0
    assert plain("a\x1b[31m\nb") == "a?[31m?b"
    assert cut("\033[1mabcdef\033[0m", 3) == "\033[1mabc\033[0m"


class _Answers(BaseHTTPRequestHandler):
    """A server that is always doing the same."""

    def do_GET(self) -> None:
        body = {"/metrics": METRICS, "/engines": json.dumps({"data": ENGINES})}.get(self.path)
        body = body or json.dumps({"data": [REQUEST], "has_more": True})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_once(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", url, "--once", "--interval", "0.1"]) == 0
    printed = capsys.readouterr().out
    assert "\033" not in printed
    assert "2 of 8 running" in printed
    assert "no worker" in printed
    assert main(["--url", "http://127.0.0.1:1", "--once"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "penstock top: no server answers at http://127.0.0.1:1 (Connection refused); `penstock serve`"
    )


def test_keys(checkpoint: Path, sockets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        f'[[keys]]\nid = "m"\nsha256 = "{digest("pk-m").hex()}"\nscopes = ["metrics"]\n'
        f'[[keys]]\nid = "a"\nsha256 = "{digest("pk-a").hex()}"\nscopes = ["metrics", "admin"]\n'
    )
    with live_server(checkpoint, sockets, frontend={"api_keys_file": str(keys)}) as live:
        shown = ["--url", live.url, "--once", "--interval", "0.1"]
        assert main(shown) == 1
        assert main([*shown, "--api-key", "pk-m"]) == 0
        printed = capsys.readouterr().out
        assert "not shown: this API key lacks the scope 'admin'" in printed
        for title in ("rows", "queue", "rates", "first token", "between tokens", "whole request", "pages"):
            assert re.search(f"^{title} ", printed, re.MULTILINE), title


def test_what_a_page_shows() -> None:
    view = View(name="here")
    view.looks.append(look(METRICS.replace(" 2048", " 7"), 0.0))
    assert "/s" not in "".join(view.lines(200, 100))  # one look tells of no rates
    view.looks[0] = look(METRICS.replace(" 2048", " 0"), 1.0)
    view.looks.append(look(METRICS, 2.0))
    view.requests = {"data": [REQUEST], "has_more": True}
    view.engines = ENGINES
    page = re.sub("\033\\[[0-9]*m", "", "\n".join(view.lines(200, 100)))
    assert "2 of 8 running" in page
    assert "3 waiting (0 tokens): 1 no free pages, 2 no free row; 0 paused" in page
    assert "30 free, 10 cached; 2.0 KiB/s to_host" in page
    assert "50 used" in page
    assert "no worker" in page
    assert "a?]0;b" in page
    assert "and more" in page
    assert "\x1b]" not in page
    narrow = view.lines(20, 5)
    assert len(narrow) == 5
    assert all(len(re.sub("\033\\[[0-9]*m", "", line)) <= 20 for line in narrow)


class Screen:
    """`penstock top` in a terminal."""

    def __init__(self, *arguments: str) -> None:
        self._own, other = pty.openpty()
        self.resize(24, 80)
        command = [sys.executable, "-m", "penstock.cli.top", *arguments]
        self.process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, close_fds=True)
        os.close(other)
        self.seen = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, what: str, after: int = 0) -> str:
        deadline = time.monotonic() + WAIT_SECONDS
        while what not in self.seen[after:]:
            assert time.monotonic() < deadline, self.seen[-2000:]
            if select.select([self._own], [], [], 1.0)[0]:
                try:
                    self.seen += os.read(self._own, 65536).decode(errors="replace")
                except OSError:  # it has ended
                    assert what in self.seen[after:], self.seen[-2000:]
        return self.seen[after:]

    def type(self, keys: bytes) -> None:
        os.write(self._own, keys)

    def close(self) -> None:
        os.close(self._own)


def _last_page(seen: str) -> list[str]:
    """The lines of the last page that is whole."""
    pages = re.findall("\033\\[H(.*?)\033\\[J", seen, re.DOTALL)
    return [re.sub("\033\\[[0-9?]*[A-Za-z]", "", line) for line in pages[-1].splitlines()] if pages else [""] * 10


def test_in_a_terminal(url: str) -> None:
    screen = Screen("--url", url, "--interval", "0.2")
    try:
        screen.read_until("\033[?1049h")
        screen.read_until("between tokens")
        widest = max(len(re.sub("\033\\[[0-9?]*[A-Za-z]", "", line)) for line in screen.seen.splitlines())
        assert widest < 80
        at = len(screen.seen)
        screen.resize(10, 40)
        screen.process.send_signal(signal.SIGWINCH)
        screen.read_until("\033[J", at)
        for _ in range(20):  # one of the old size may have been on its way
            if len(_last_page(screen.seen[at:])) > 9:
                screen.read_until("\033[J", len(screen.seen))
        assert len(_last_page(screen.seen)) <= 9
        assert max(map(len, _last_page(screen.seen))) < 40
        screen.type(b"q")
        screen.read_until("\033[?1049l")
        assert screen.process.wait(WAIT_SECONDS) == 0
    finally:
        screen.process.kill()
        screen.process.wait()
        screen.close()
