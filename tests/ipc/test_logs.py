"""Logging neither waits nor fails, whatever stands behind the descriptor."""

import fcntl
import json
import os
import select
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.ipc import logs
from penstock.ipc.logs import LogSink, SinkStream

SOON = 20.0


class Pipe:
    """A pipe of one page: 4096 bytes fit."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, 4096)

    def read(self, until: bytes) -> bytes:
        """Read until the text holds `until`."""
        found = b""
        while until not in found:
            piece = os.read(self.read_end, 65536)
            assert piece, found
            found += piece
        return found

    def close(self) -> None:
        for descriptor in (self.read_end, self.write_end):
            with suppress(OSError):
                os.close(descriptor)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def test_lines_come_in_order_and_whole(pipe: Pipe) -> None:
    sink = LogSink(pipe.write_end)
    for i in range(50):
        sink.put(f"line {i}\n")
    assert pipe.read(b"line 49\n").decode().splitlines() == [f"line {i}" for i in range(50)]
    assert sink.num_dropped == 0
    assert sink.flush(SOON)


def test_a_pipe_that_nobody_reads_costs_lines_and_no_time(pipe: Pipe) -> None:
    told: list[int] = []
    sink = LogSink(pipe.write_end, told.append)
    began = time.monotonic()
    for i in range(20_000):
        sink.put(f"{i} {'x' * 100}\n")
    assert time.monotonic() - began < SOON  # it would wait for ever
    assert not sink.flush(0.05)
    num_dropped = sink.num_dropped
    assert 10_000 < num_dropped < 20_000
    lines = b""
    while not told:  # somebody reads again: what waited comes, then how many did not
        if select.select([pipe.read_end], [], [], 0.05)[0]:
            lines += os.read(pipe.read_end, 65536)
    assert told == [num_dropped]
    sink.put("end")
    lines += pipe.read(b"end")
    assert lines.startswith(b"0 xxx")
    assert lines.count(b"\n") == 20_000 - num_dropped


def test_a_reader_that_left_costs_lines(pipe: Pipe) -> None:
    sink = LogSink(pipe.write_end)
    os.close(pipe.read_end)
    for _ in range(10):
        sink.put("nobody hears this\n")
    assert sink.flush(SOON)
    assert sink.num_dropped == 10


def test_a_full_disk_costs_lines() -> None:
    with Path("/dev/full").open("wb") as full:
        sink = LogSink(full.fileno())
        for _ in range(10):
            sink.put("no room for this\n")
        assert sink.flush(SOON)
        assert sink.num_dropped == 10


def test_a_pipe_made_non_blocking_by_others_loses_nothing(pipe: Pipe) -> None:
    os.set_blocking(pipe.write_end, False)
    sink = LogSink(pipe.write_end)
    for i in range(300):
        sink.put(f"{i} {'x' * 100}\n")
    found = pipe.read(b"299 " + b"x" * 100)
    assert [int(line.split()[0]) for line in found.splitlines()] == list(range(300))
    assert sink.num_dropped == 0


def test_text_of_others_goes_by_lines(pipe: Pipe) -> None:
    stream = SinkStream(LogSink(pipe.write_end), pipe.write_end)
    print("one", "line", file=stream)
    print("a part", end="", file=stream)
    assert pipe.read(b"\n") == b"one line\n"
    stream.flush()
    assert pipe.read(b"part") == b"a part"
    assert not stream.isatty()
    stream.write("lone surrogate \ud800\n")
    assert pipe.read(b"\n") == b"lone surrogate \\ud800\n"


def run(program: str, **options: object) -> subprocess.Popen[str]:
    source = "import structlog, sys\nfrom penstock.ipc import process\nprocess.begin('p', 'info', 'json')\n"
    command = [sys.executable, "-c", source + textwrap.dedent(program)]
    return subprocess.Popen(command, text=True, **options)  # type: ignore[call-overload,no-any-return]


def test_last_words_are_written(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        running = run(
            """
            import warnings
            structlog.get_logger().info("one")
            warnings.warn("two")
            secret = "a prompt or a key"
            try:
                raise ValueError("three")
            except ValueError:
                structlog.get_logger().exception("failed")
            sys.stderr.write("not a whole line")
            raise KeyError("five")
            """,
            stderr=log,
        )
        assert running.wait(SOON) == 1
    text = (tmp_path / "log").read_text()
    assert json.loads(text.splitlines()[0])["event"] == "one"
    assert json.loads(text.splitlines()[0])["process"] == "p"
    for words in ("UserWarning: two", "three", "not a whole line", "KeyError: 'five'"):
        assert words in text
    assert "a prompt or a key" not in text.replace('secret = "a prompt or a key"', "")


def test_a_process_ends_although_nobody_reads(pipe: Pipe) -> None:
    running = run(
        """
        for i in range(1000):
            structlog.get_logger().info("line", i=i)
        """,
        stderr=pipe.write_end,
    )
    assert running.wait(SOON) == 0


def test_a_file_that_has_no_room_for_a_while_gets_whole_lines_again(tmp_path: Path) -> None:
    """A line is torn by the end of the disk; the next one that fits starts a line of its own."""
    with (tmp_path / "log").open("w") as log:
        running = run(
            """
            import resource, time
            from penstock.ipc.logs import flush_logs, num_dropped_log_lines
            resource.setrlimit(resource.RLIMIT_FSIZE, (250, -1))
            for i in range(5):
                structlog.get_logger().info("line", i=i)
                flush_logs()
            assert num_dropped_log_lines() == 3, num_dropped_log_lines()
            resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
            structlog.get_logger().info("again")
            flush_logs()
            """,
            stderr=log,
        )
        assert running.wait(SOON) == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines[:2] + lines[3:]] == [
        "line",
        "line",
        "again",
        "log lines were dropped",
    ]
    assert json.loads(lines[-1])["count"] == 3


def test_closed_standard_streams_are_replaced() -> None:
    """Else a socket could get the number of stderr, and log lines with it."""
    program = """
import os, sys
for descriptor in range(3):
    os.close(descriptor)
from penstock.ipc.process import open_standard_streams
open_standard_streams()
good = all(os.path.samestat(os.fstat(d), os.stat(os.devnull)) and os.get_inheritable(d) for d in range(3))
sys.exit(not good)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("is_terminal", "environment", "has_colors"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "dumb"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_colors_are_for_terminals_that_want_them(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, environment: dict[str, str], has_colors: bool
) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: is_terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    line = logs._console_renderer()(None, "warning", {"event": "slow", "level": "warning", "reason": "torch"})
    assert ("\x1b" in str(line)) is has_colors
    assert "slow" in str(line)
