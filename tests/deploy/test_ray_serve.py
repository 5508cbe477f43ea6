"""The application on a real cluster of two raylets: streams outlive engines that come, die and go."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'penstock-llm[ray]'")

IS_SOAK = bool(os.environ.get("PENSTOCK_SOAK"))


def program(name: str, out: Path, *arguments: str) -> dict[str, Any]:
    """The report of a program beside this file, which runs in a process of its own: Ray has one cluster a process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", f"tests.deploy.{name}", "--port", str(port), "--out", str(out), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert out.exists(), run.stdout[-3000:] + run.stderr[-3000:]
    report: dict[str, Any] = json.loads(out.read_text())
    return report


@pytest.mark.long
@pytest.mark.timeout(540)
def test_no_stream_fails_while_engines_come_die_and_go(tmp_path: Path) -> None:
    report = program("ray_load", tmp_path / "report.json", *(["--seconds", "20"] if IS_SOAK else ["--quick"]))
    counts = report["counts"]
    assert report["failures"] == []
    assert counts["changed"] == counts.get("failed", 0) == 0
    assert min(counts["up streams"], counts["kill streams"]) >= report["streams"]
    assert counts["down streams"] >= report["few"]


@pytest.mark.timeout(540)
@pytest.mark.skipif(not IS_SOAK, reason="a second cluster: PENSTOCK_SOAK=1")
def test_ranks_on_two_nodes_answer_as_one_worker(tmp_path: Path) -> None:
    """And go on when one of them is killed."""
    report = program("ray_ranks", tmp_path / "report.json")
    assert (report["num_ranks"], report["nodes"]) == (2, 2)
    assert report["found"] == report["expected"]
    assert report["after_kill"] == report["expected"][0]
    assert (report["exit_code"], report["left"]) == (0, 0)
