"""The window of steps that a profile holds."""

import json
from pathlib import Path

import pytest
import structlog
import torch

from penstock.config import ConfigError
from penstock.gpu_worker.profiler import StepProfiler


def test_one_window_is_recorded_and_no_more(tmp_path: Path) -> None:
    profiler = StepProfiler(str(tmp_path / "new"), num_skipped=2, num_recorded=3)
    x = torch.ones(4, 4)
    for _ in range(9):
        x @ x
        profiler.step()
    written = profiler.file.stat().st_mtime_ns
    events = json.loads(profiler.file.read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::matmul" for event in events) == 3
    profiler.close()
    assert profiler.file.stat().st_mtime_ns == written


def test_more_windows_are_recorded_when_they_are_asked_for(tmp_path: Path) -> None:
    profiler = StepProfiler(str(tmp_path), num_skipped=1, num_recorded=1)
    first = profiler.file
    x = torch.ones(4, 4)

    def steps(count: int) -> None:
        for _ in range(count):
            x @ x
            profiler.step()

    def num_recorded(file: Path) -> int:
        events = json.loads(file.read_text())["traceEvents"]
        return sum(event.get("name") == "aten::matmul" for event in events)

    steps(4)
    profiler.record(2)
    second = profiler.file
    profiler.record(50)  # one is being recorded
    assert profiler.file == second
    steps(5)
    profiler.record(500)
    third = profiler.file
    steps(4)
    profiler.record(0)
    assert (num_recorded(first), num_recorded(second), num_recorded(third)) == (1, 2, 3)
    profiler.record(10)
    profiler.close()  # before its first step
    assert sorted(tmp_path.iterdir()) == sorted([first, second, third])


def test_a_folder_that_cannot_be_is_a_clear_refusal(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--profile .*file/below"):
        StepProfiler(str(tmp_path / "file" / "below"))


def test_a_profile_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    """The folder is gone, or its disk is full: the worker serves on."""
    profiler = StepProfiler(str(tmp_path / "new"), num_skipped=1, num_recorded=2)
    profiler.file.unlink()
    profiler.file.parent.rmdir()
    x = torch.ones(4, 4)
    with structlog.testing.capture_logs() as logged:
        for _ in range(4):
            x @ x
            profiler.step()
        profiler.close()
    assert [entry["event"] for entry in logged if entry["log_level"] == "error"] == ["profile not written"]
