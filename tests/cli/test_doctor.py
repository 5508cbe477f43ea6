"""`penstock doctor`: what is misconfigured is found, with what to do; good machines have nothing of it."""

import json
import os
import resource
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import pytest

from penstock.cli import checks, doctor, measurements
from penstock.cli.checks import Finding
from penstock.lab.planning.machines import load_machines
from penstock.lab.planning.requests import Describe, Inspect, Installation, Measurer, MemoryRate, SlowError

GOOD: dict[str, Any] = {
    "torch": "2.13.0", "triton": "3.6.0", "cuda": "", "cuda_error": "", "driver": "", "gpus": [], "num_threads": 2,
    "compiler": "/usr/bin/c++", "library": "/cache/kernels.so", "family": "", "multiplies_tiles": False,
}  # fmt: skip


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


class Neighbour:
    """In place of the process that measures."""

    there: ClassVar[dict[str, Any]] = GOOD
    asked: ClassVar[list[object]] = []
    slow: ClassVar[set[type]] = set()

    def __enter__(self) -> "Neighbour":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def ask(self, request: object, answer: type, patience: float) -> object:
        self.asked.append(request)
        if type(request) in self.slow:
            raise SlowError(f"no answer within {patience:g} s")
        match request:
            case Inspect():
                return Installation(**self.there)
            case MemoryRate():
                return 20e9
            case Describe():
                return load_machines()["h100"]
        raise AssertionError(request)


@pytest.fixture
def neighbour(monkeypatch: pytest.MonkeyPatch) -> type[Neighbour]:
    monkeypatch.setattr(measurements, "Measurer", Neighbour)
    monkeypatch.setattr(Neighbour, "there", dict(GOOD))
    monkeypatch.setattr(Neighbour, "asked", [])
    monkeypatch.setattr(Neighbour, "slow", set())
    return Neighbour


def test_a_good_machine(neighbour: type[Neighbour], capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json"]) == 0
    found = {finding["title"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert all(finding["level"] != "broken" for finding in found.values())
    assert found["memory reads"]["text"].startswith("20.0 GB/s")
    assert "tokens/s at 1 row" in found["expected"]["text"]
    assert doctor.main(["--quick"]) == 0
    printed = capsys.readouterr().out
    assert "the demo model: at least" in printed
    assert "at 8 rows; more if the caches hold its weights" in printed
    assert "CPU kernels" in printed
    assert sum(isinstance(request, Describe) for request in neighbour.asked) == 1


def test_quick_is_bound_by_memory(neighbour: type[Neighbour], capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main(["--json", "--quick"])
    found = {finding["title"]: finding for finding in json.loads(capsys.readouterr().out)}
    weights = 5_770_496 * 2  # of the demo model; its embedding is its head, too
    rate = float(found["expected"]["text"].partition("at least ")[2].partition(" ")[0].replace(",", ""))
    assert 0.9 * 20e9 / weights < rate < 1.1 * 20e9 / weights
    assert "bound by memory" in found["expected"]["text"]


def test_what_takes_too_long_is_told_and_the_rest_goes_on(
    neighbour: type[Neighbour], capsys: pytest.CaptureFixture[str]
) -> None:
    neighbour.slow.add(Describe)
    assert doctor.main(["--patience", "7"]) == 0
    printed = capsys.readouterr().out
    assert "of made-up models: no answer within 7 s" in printed
    assert "tokens/s at 1 row" in printed  # by memory alone
    assert "--patience 14" in printed
    neighbour.slow.add(Inspect)
    assert doctor.main([]) == 0
    assert "no answer within 60 s" in capsys.readouterr().out


def test_each_line_is_printed_as_it_is_found(neighbour: type[Neighbour], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read by a program is not kept back until the end."""
    begin, end = os.pipe()
    with open(begin, "rb", buffering=0) as reader, open(end, "w") as writer, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", writer)

        def all_checks() -> Iterator[Finding]:
            yield Finding("fine", "first", "one")
            assert reader.read(1000) == b"fine    first            one\n"
            yield Finding("broken", "second", "two")

        patched.setattr(doctor, "all_checks", all_checks)
        assert doctor.main([]) == 1


def test_a_process_that_measures_for_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(SlowError, match=r"no answer within 0\.01 s"), Measurer() as measurer:
        measurer.ask(MemoryRate(), float, 0.01)


def test_no_minutes_are_spent_on_kernels_that_are_slow_anyway(
    neighbour: type[Neighbour], capsys: pytest.CaptureFixture[str]
) -> None:
    neighbour.there |= {"library": "", "compiler": ""}
    assert doctor.main(["--json"]) == 0
    found = {finding["title"]: finding["text"] for finding in json.loads(capsys.readouterr().out)}
    assert "not measured" in found["expected"]
    assert "sequences of 256 tokens fit" in found["room"]
    assert not any(isinstance(request, Describe) for request in neighbour.asked)
    neighbour.there |= {"compiler": "/usr/bin/c++"}  # the measurement compiles them first
    assert doctor.main([]) == 0
    assert any(isinstance(request, Describe) for request in neighbour.asked)


def test_a_model_that_is_not_there(
    neighbour: type[Neighbour], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in (str(tmp_path / "none"), "nobody/nothing", str(tmp_path)):
        assert doctor.main([name, "--quick"]) == 1
        printed = capsys.readouterr().out
        assert "broken  model" in printed
        assert "memory reads" in printed  # the rest is told all the same
        assert "model: `penstock models` lists" in printed


@pytest.mark.parametrize(
    ("changed", "title", "text", "advice"),
    [
        ({"library": ""}, "CPU kernels", "not compiled yet", "penstock.kernels.native.build"),
        ({"library": "", "compiler": ""}, "CPU kernels", "no compiler", "apt install g++"),
        ({"driver": "580.1"}, "GPU", "without CUDA", "pip install torch"),
        ({"driver": "580.1", "cuda": "13.0", "cuda_error": "too old"}, "GPU", "too old", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_serves_more_slowly(
    neighbour: type[Neighbour],
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, Any],
    title: str,
    text: str,
    advice: str,
) -> None:
    neighbour.there |= changed
    assert doctor.main(["--json", "--quick"]) == 0
    [found] = [each for each in json.loads(capsys.readouterr().out) if each["title"] == title]
    assert found["level"] == "slow"
    assert text in found["text"]
    assert advice in found["advice"]


def test_a_gpu(neighbour: type[Neighbour], capsys: pytest.CaptureFixture[str]) -> None:
    neighbour.there |= {"gpus": [("NVIDIA H100", 80 << 30)], "driver": "580.1", "cuda": "13.0"}
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    assert "NVIDIA H100, 80.0 GiB, driver 580.1, CUDA 13.0" in printed
    assert "memory reads" not in printed


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["msgspec>=999", "no-such-thing>=1", "torch>=2", "ray>=1; extra == 'ray'"]
    monkeypatch.setattr(metadata, "requires", lambda name: needed)
    monkeypatch.setattr(metadata, "metadata", lambda name: {"Requires-Python": ">=3.11"})
    found = [finding for finding in checks.packages() if finding.level == "broken"]
    assert [finding.text.split()[0] for finding in found] == ["msgspec", "no-such-thing"]
    assert all("pip install --upgrade penstock-llm" in finding.advice for finding in found)


def test_what_is_broken_ends_with_1(neighbour: type[Neighbour], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "all_checks", lambda: iter([Finding("broken", "packages", "torch is missing", "pip")]))
    assert doctor.main(["--quick"]) == 1
    assert not neighbour.asked


@pytest.mark.parametrize(("text", "level"), [("always [madvise] never", "fine"), ("always madvise [never]", "slow")])
def test_huge_pages(tmp_path: Path, text: str, level: str) -> None:
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", text)
    assert checks.huge_pages(tmp_path).level == level
    assert checks.huge_pages(tmp_path / "none").level == "slow"


def test_processors(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "model name : Some CPU\nflags : fpu avx2 amx_bf16 fma\n")
    assert checks.processor(tmp_path).text == "Some CPU: avx2 fma amx_bf16"
    write(tmp_path, "proc/cpuinfo", "model name : Old CPU\nflags : fpu sse2\n")
    assert checks.processor(tmp_path).level == "slow"


def test_cores_and_memory_of_a_control_group(tmp_path: Path) -> None:
    num = len(os.sched_getaffinity(0))
    write(tmp_path, "sys/fs/cgroup/cpu.max", f"{num * 50000} 100000\n")
    write(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")
    found = {finding.title: finding for finding in checks.cores(tmp_path)}
    assert found["cores"].level == "slow"
    assert f"--num-threads {max(num // 2, 1)}" in found["cores"].advice
    assert found["clock"].level == "note"
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000\n")
    assert next(checks.cores(tmp_path)).level == "fine"
    write(tmp_path, "proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 800 kB\n")
    assert checks.memory_bytes(tmp_path) == (1024000, 819200)
    write(tmp_path, "sys/fs/cgroup/memory.max", "512000\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "500000\n")
    assert checks.memory_bytes(tmp_path) == (512000, 12000)
    assert checks.memory_bytes(tmp_path / "none") is None


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for hard, level in ((1024, "slow"), (65536, "fine"), (resource.RLIM_INFINITY, "fine")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (256, hard))
        assert checks.open_files().level == level
