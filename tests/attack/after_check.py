"""A server under attack, and what must hold after every attack: nothing died, nothing leaked, the answers are the same.

The server runs with PYTHONOPTIMIZE=1, as `python -O` does: a check of the product that is an `assert` is not there.
"""

import http.client
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from penstock.models.files.source import fingerprint
from penstock.models.finding.registry import open_checkpoint
from tests.internal_fields import command as command_for

START_SECONDS = 200
MAX_GROWTH = 64 << 20
"""Bytes of resident memory that a process may have gained since its start, after all rows so far: allocators keep what
the largest body took, once. `test_repeated` in test_http.py looks for what grows with every request."""

CHILDREN_OF_FRONTEND = 2 * (3 + 2)
"""Descriptors for three processes that read grammars and two that render templates, once they are needed."""

CANARY = {"prompt": "The gate opens slowly", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
OURS = ("penstock-frontend-0", "penstock-scheduler", "penstock-worker-0")


class Victim:
    """A running server: ask it, throw bytes at it, then check it."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, folder: Path, runtime: Path) -> None:
        self.process = process
        self.log = log
        self.folder = folder
        self.runtime = runtime  # where the sockets are
        self.fingerprint = fingerprint(open_checkpoint(folder))
        self.port = 0
        deadline = time.monotonic() + START_SECONDS
        while not self.port:
            for line in log.read_text().splitlines():
                if line.startswith("{") and (entry := json.loads(line))["event"] == "serving":
                    self.port = int(entry["url"].rsplit(":", 1)[1])
            assert time.monotonic() < deadline, log.read_text()
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2})
        self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 100_000})
        self.canary = self.post("/v1/completions", CANARY)
        assert self.canary[0] == 200
        self.processes = self._processes()
        assert set(self.processes) == set(OURS)
        self._baseline = {
            name: (p.memory_info().rss, p.num_fds(), p.num_threads()) for name, p in self.processes.items()
        }

    def _processes(self) -> dict[str, psutil.Process]:
        below = psutil.Process(self.process.pid).children(recursive=True)
        named = {child.cmdline()[0]: child for child in below if child.cmdline()}
        return {name: process for name, process in named.items() if name in OURS}

    def post(self, path: str, body: Any, content_type: str = "application/json") -> tuple[int, str]:
        """Status and text of the answer; of what the model said, only the text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, content, {"Content-Type": content_type})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status == 200 and path == "/v1/completions":
            text = json.loads(text)["choices"][0]["text"]
        return answer.status, text

    def get(self, path: str) -> str:
        """The text of an answer."""
        return self._get(path)[1]

    def status(self, path: str) -> int:
        """The status of an answer."""
        return self._get(path)[0]

    def _get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def throw(self, *pieces: bytes, seconds: float = 20.0) -> bytes:
        """Send bytes on a connection of their own; the beginning of what comes back (nothing: closed)."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            try:
                for piece in pieces:
                    connection.sendall(piece)
                return connection.recv(65536)
            except ConnectionError:
                return b""

    def metrics(self) -> dict[str, float]:
        """All samples without labels."""
        lines = [line for line in self.get("/metrics").splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.split() for line in lines if "{" not in line)}

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait for something that comes by itself."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.1)

    def check(self) -> None:
        """What must hold after every attack."""
        deadline = time.monotonic() + 60
        while True:
            found = self.metrics()
            # Until the engine has said how it is, there is nothing of it.
            idle = found.get("penstock_num_used_pages") == 0 == found.get("penstock_num_requests_waiting")
            if idle and found["penstock_num_requests_in_frontend"] <= 1:
                break
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        assert found["penstock_num_free_pages"] + found["penstock_num_cached_pages"] == found["penstock_num_pages"]
        assert self.post("/v1/completions", CANARY) == self.canary
        assert self.status("/health") == self.status("/ready") == 200
        now = self._processes()
        assert {name: p.pid for name, p in now.items()} == {name: p.pid for name, p in self.processes.items()}
        for name, (rss, num_fds, num_threads) in self._baseline.items():
            assert now[name].memory_info().rss - rss < MAX_GROWTH, name
            assert now[name].num_threads() >= num_threads, name
            most = num_fds + CHILDREN_OF_FRONTEND
            self.wait_until(partial(_has_at_most, now[name], most))
        said = self.log.read_text()
        assert "Traceback" not in said
        assert '"exception"' not in said
        assert "request failed" not in said


def _has_at_most(process: psutil.Process, num_fds: int) -> bool:
    return bool(process.num_fds() <= num_fds)


def tells_nothing(text: str, victim: Victim) -> bool:
    """Whether an answer names no file, no address in memory and no module, and repeats little of what was sent."""
    return (
        len(text) < 2000
        and str(victim.folder) not in text
        and " at 0x" not in text
        and "penstock/" not in text
        and ".py" not in text
    )


@contextmanager
def victim(folder: Path, *flags: str, **environment: str) -> Iterator[Victim]:
    """Serve a checkpoint until the block ends."""
    with tempfile.NamedTemporaryFile(suffix=".log") as log, tempfile.TemporaryDirectory(prefix="pst-") as runtime:
        command = [
            *command_for(environment),
            "serve",
            str(folder),
            "--port",
            "0",
            "--num-threads",
            "1",
        ]
        settings = {
            "PENSTOCK_LOG_FORMAT": "json",
            "PENSTOCK_SPARE_WORKER": "false",
            "PYTHONOPTIMIZE": "1",
        } | environment
        process = subprocess.Popen([*command, "--runtime-dir", runtime, *flags], stderr=log, env=os.environ | settings)
        try:
            yield Victim(process, Path(log.name), folder, Path(runtime))
        finally:
            process.terminate()
            process.wait(90)
