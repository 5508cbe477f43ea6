"""Starts the scripted server of a family; knows nothing of Penstock but its command line."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.agents.families import MAX_LEN, Family, write_folder
from tests.agents.script import rules

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("SERVER_PYTHON", sys.executable)
"""That of the environment in which Penstock is installed."""

START_SECONDS = 200.0
MODEL = "scripted"


@contextlib.contextmanager
def scripted_server(
    folder: Path, family: Family, *flags: str, script: list[dict[str, Any]] | None = None, max_len: int = MAX_LEN
) -> Iterator[str]:
    """The server's base URL; its processes end with the block. The script is the frameworks' story if none is given."""
    write_folder(folder, family, rules(family) if script is None else script, max_len)
    with _serving("tests.agents.scripted_serve", folder, "--served-model-name", MODEL, *flags) as url:
        yield url


@contextlib.contextmanager
def demo_server() -> Iterator[str]:
    """The base URL of a server with the demo model."""
    with _serving("penstock.cli", "serve", ROOT / "demo" / "model", "--served-model-name", "penstock-demo") as url:
        yield url


@contextlib.contextmanager
def _serving(module: str, *arguments: str | Path) -> Iterator[str]:
    command = [PYTHON, "-m", module, *map(str, arguments), "--port", "0", "--num-threads", "1"]
    command += ["--cpu-kv-cache-gib", "1"]
    settings = {"PENSTOCK_LOG_FORMAT": "json", "PENSTOCK_TEST_MODELS": "tests.clockwork.family", "OMP_NUM_THREADS": "1"}
    settings["PENSTOCK_SPARE_WORKER"] = "false"  # no worker is to die
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | settings, stderr=subprocess.PIPE) as process:
        log = _Log(process)
        try:
            yield log.serving()["url"]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()


class _Log:
    """Reads the server's log, so that it never waits for a reader."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._lines: list[dict[str, Any]] = []
        self._is_serving = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._thread.start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            try:
                entry = json.loads(line)
            except ValueError:
                entry = {"event": line.decode(errors="replace").rstrip()}
            self._lines.append(entry)
            if entry["event"] == "serving":
                self._is_serving.set()
        self._is_serving.set()

    def serving(self) -> dict[str, Any]:
        """The line that says where; fails if the server ends without it."""
        self._is_serving.wait(START_SECONDS)
        found = [entry for entry in self._lines if entry["event"] == "serving"]
        assert found, f"the server does not serve: {self._lines}"
        return found[0]
