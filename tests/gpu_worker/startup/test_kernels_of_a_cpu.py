"""Which kernels a worker on a CPU gets when none are compiled yet, and what it says."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.config import ConfigError
from penstock.config.slow_kernels import FACTOR, slow_kernels
from penstock.gpu_worker.devices import open as opening
from penstock.kernels.native.build import BuildError


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "built_library", lambda: None)


@pytest.mark.usefixtures("nothing_compiled")
def test_who_has_no_compiler_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "find_compiler", lambda: None)
    with capture_logs() as logs:
        assert opening._library("auto", 1) is None
    assert [(line["log_level"], f"{FACTOR} times slower" in line["reason"]) for line in logs] == [("warning", True)]


@pytest.mark.usefixtures("nothing_compiled")
def test_a_compiler_is_used_and_its_failure_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> Path:
        raise BuildError("no such target")

    monkeypatch.setattr(opening, "find_compiler", lambda: "/usr/bin/c++")
    monkeypatch.setattr(opening, "build", build)
    with capture_logs() as logs:
        assert opening._library("auto", 1) is None
    assert [line["log_level"] for line in logs] == ["info", "warning", "warning"]
    assert logs[1]["error"] == "no such target"
    with pytest.raises(ConfigError, match="no such target"):
        opening._library("native", 1)
    with capture_logs() as logs:
        assert opening._library("torch", 1) is None  # as wanted
    assert not logs


def test_only_torch_on_a_cpu_is_slow() -> None:
    assert f"{FACTOR} times slower" in slow_kernels("cpu (2 threads)", "torch")
    for device, kernels in (("cpu (2 threads)", "native"), ("NVIDIA H100", "torch")):
        assert slow_kernels(device, kernels) == ""
