"""The names of devices, and writes into the CPU's memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config import ConfigError
from penstock.gpu_worker.devices import open as device_module
from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.devices.cuda import CudaDevice, _wait_for
from penstock.gpu_worker.devices.open import open_device
from tests.kernels.runs import write_runs_reference


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU is opened with is all that is left of it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        device_module, "CudaDevice", lambda index: SimpleNamespace(torch_device=torch.device("cuda", index))
    )


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("wanted", "index"), [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_gpu_is_always_known_by_its_index(wanted: str, index: int) -> None:
    assert open_device(wanted, 1).torch_device.index == index


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("wanted", ["cuda:2", "mps", "gpu", "cuda:x"])
def test_what_is_no_device_is_refused(wanted: str) -> None:
    with pytest.raises(ConfigError, match="--device"):
        open_device(wanted, 1)


def test_without_a_gpu_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(open_device("auto", 1), CpuDevice)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="0 CUDA devices"):
        open_device("cuda", 1)


def test_pinned_memory_is_given_back_when_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before the last view of it, and when all copies have ended."""
    calls: list[tuple[object, ...]] = []

    def pin(address: int, count: int, flags: int) -> int:
        calls.append(("pin", address, count))
        return flags

    driver = SimpleNamespace(cudaHostRegister=pin, cudaHostUnregister=lambda at: calls.append(("unpin", at)))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(("wait", device)))
    device = CudaDevice.__new__(CudaDevice)  # no GPU is needed
    device.torch_device = torch.device("cuda", 1)
    memory = device.host_memory((3, 2, 5), torch.float16)
    address = memory.data_ptr()
    assert calls == [("pin", address, 60)]
    view = memory.view(torch.uint8).numpy()
    del memory
    assert len(calls) == 1
    del view
    assert calls[1:] == [("wait", device.torch_device), ("unpin", address)]


def test_other_threads_wait_on_the_device_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first GPU would be the current one."""
    entered: list[object] = []

    @contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", enter)
    event: Any = SimpleNamespace(device=torch.device("cuda", 1), synchronize=lambda: entered.append("waited"))
    _wait_for(event)
    assert entered == [torch.device("cuda", 1), "waited"]


@pytest.mark.parametrize("num_runs", [1, 3, 20])  # few are written one after the other, many by an index
def test_runs_are_written_on_the_cpu(num_runs: int) -> None:
    counts = np.array([i % 4 for i in range(num_runs)], dtype=np.int32)
    rows = np.array([num_runs - 1 - i // 4 for i in range(num_runs)], dtype=np.int32)
    starts = np.array([4 * (i % 4) for i in range(num_runs)], dtype=np.int32)
    values = np.arange(100, 100 + counts.sum(), dtype=np.int32)
    written, expected = torch.zeros(2, 20, 16, dtype=torch.int32)
    CpuDevice(1).write_runs(written, rows, starts, counts, values)
    write_runs_reference(expected, *map(torch.from_numpy, (rows, starts, counts, values)))
    assert torch.equal(written, expected)
