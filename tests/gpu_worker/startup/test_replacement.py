"""A worker that replaces another on a device whose memory comes back slowly, or not at all."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.config import Config, ConfigError, ModelOptions
from penstock.gpu_worker.devices.out_of_memory import NoMemoryError
from penstock.gpu_worker.startup import replacement
from penstock.gpu_worker.startup.replacement import StillNoMemoryError, start_again, wait_until_settled
from penstock.ipc import process
from tests.faults.clockwork import make_clockwork

GIB = 1 << 30


class FakeDevice:
    """Its free memory rises from the first look on, a GiB each time it is looked at, up to a size."""

    def __init__(self, free: int, size: int) -> None:
        self.free, self.size = free * GIB, size * GIB
        self.num_starts = 0

    def free_memory(self) -> int:
        self.free = min(self.free + GIB, self.size)
        return self.free

    def start(self, needed: int) -> str:
        self.num_starts += 1
        if self.free < needed * GIB:
            raise NoMemoryError(f"{needed} GiB do not fit {self.free / GIB:.0f}")
        return "started"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement, "SECONDS", 3.0)
    monkeypatch.setattr(replacement, "_LOOK_SECONDS", 0.01)


def test_it_starts_when_the_memory_has_come_back() -> None:
    device = FakeDevice(free=2, size=16)
    assert start_again(lambda: device.start(12), device.free_memory) == "started"
    assert device.num_starts == 2  # not before all was there


def test_what_fits_is_not_waited_for() -> None:
    device = FakeDevice(free=16, size=16)
    assert start_again(lambda: device.start(12), device.free_memory) == "started"
    assert device.num_starts == 1


def test_memory_that_does_not_come_back_is_no_verdict_on_the_configuration() -> None:
    device = FakeDevice(free=10, size=11)
    began = time.monotonic()
    with pytest.raises(StillNoMemoryError, match="12 GiB") as caught:
        start_again(lambda: device.start(12), device.free_memory)
    assert not isinstance(caught.value, ConfigError)
    assert time.monotonic() - began >= 3.0


def test_other_errors_are_told_at_once() -> None:
    def start() -> None:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        start_again(start, lambda: 0)


def test_memory_is_measured_when_it_has_settled() -> None:
    device = FakeDevice(free=2, size=16)
    wait_until_settled(device.free_memory)
    assert device.free == 16 * GIB


_WORKER = """
import sys
from penstock.gpu_worker import __main__ as worker
from penstock.gpu_worker.startup import pool, replacement
from penstock.gpu_worker.state import kv_pool
from penstock.gpu_worker.devices.out_of_memory import NoMemoryError

def no_page_fits(*_, **__):
    raise NoMemoryError("no KV page fits")

pool.plan_pool = no_page_fits
replacement.SECONDS = 0.3
sys.exit(worker.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("more", "code"), [((), 2), (("--replaces", "1"), 1)])
def test_the_exit_code_is_final_for_a_first_worker_only(tmp_path: Path, more: tuple[str, ...], code: int) -> None:
    config = process.pass_config(Config(model=ModelOptions(model=str(make_clockwork(tmp_path / "m")))))
    command = [sys.executable, "-c", _WORKER, "--config-fd", str(config), *more]
    ended = subprocess.run(command, pass_fds=[config], stderr=subprocess.PIPE, text=True, check=False, timeout=90)
    os.close(config)
    assert ended.returncode == code, ended.stderr
    assert "no KV page fits" in ended.stderr
