"""The CPU as a device."""

import ctypes
import math
import mmap
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.gpu_worker.devices.device import Array, Download, Graphs, Int32Array, Lane, Mark, MemoryUse
from penstock.kernels.native.library import Library

_SMALL_MODEL_BYTES = 64 << 20
"""Below this, torch's kernels are as fast on one thread as on two, and one thread leaves a core to other processes."""

_FEW_RUNS = 12
"""Up to this number, copying runs one by one takes less time than indexing all their cells."""


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


class _Ready:
    def __init__(self, tensor: Tensor) -> None:
        self._bytes = tensor.numpy().tobytes()

    def is_ready(self) -> bool:
        return True

    def wait(self) -> bytes:
        return self._bytes


class _ClockMark:
    def __init__(self) -> None:
        self._seconds = time.monotonic()

    def us_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, _ClockMark)
        return int((self._seconds - earlier._seconds) * 1e6)

    def is_passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class CpuDevice:
    """The CPU: everything happens at once, and in place."""

    torch_device = torch.device("cpu")

    graphs: Graphs | None = None
    compiles_launches = False
    frees_memory_late = False

    def __init__(self, num_threads: int = 0, library: Library | None = None) -> None:
        """`num_threads` is for torch's kernels, with 0 for one per core. A library has its own number of threads."""
        self._may_use_fewer = library is not None or not num_threads
        self.library = library
        torch.set_num_threads(num_threads or num_cores())

    @property
    def name(self) -> str:
        return f"cpu ({self.library.num_threads if self.library else torch.get_num_threads()} threads)"

    def adapt_to(self, step_bytes: int) -> None:
        if self._may_use_fewer and step_bytes < _SMALL_MODEL_BYTES:
            torch.set_num_threads(1)

    def give_back(self) -> None:
        # glibc keeps freed tensors of up to 32 MiB; for a model of a gigabyte, that is a tenth as much again.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def measure(self, step: Callable[[], None]) -> MemoryUse | None:
        return None

    def upload(self, array: Array) -> Tensor:
        return torch.from_numpy(array.copy())  # a received buffer is read-only, which torch cannot represent

    def write_runs(
        self, table: Tensor, rows: Int32Array, starts: Int32Array, counts: Int32Array, values: Int32Array
    ) -> None:
        if rows.shape[0] > _FEW_RUNS:
            # The cell of each value in the flat table: its run's first cell, plus its place within the run.
            first = rows.astype(np.int64) * table.shape[1] + starts - (counts.cumsum() - counts)
            table.view(-1).numpy()[first.repeat(counts) + np.arange(values.shape[0])] = values
            return
        cells, used = table.numpy(), 0
        for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
            cells[row, start : start + count] = values[used : used + count]
            used += count

    def mark(self) -> Mark:
        return _ClockMark()

    def download(self, tensor: Tensor) -> Download:
        return _Ready(tensor)

    def lanes(self) -> tuple[Lane, Lane] | None:
        return None

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return host_zeros(shape, dtype)

    def free_host_memory(self) -> int:
        return free_host_memory()

    def free_memory(self) -> int:
        return free_host_memory()

    def memory_use(self) -> tuple[int, int]:
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return num_pages * os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def zeroed_bytes(count: int) -> npt.NDArray[np.uint8]:
    """Return zeroed memory that the system allocates on first use, so that start-up does not wait for it."""
    return np.zeros(count, dtype=np.uint8)


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """As `zeroed_bytes`, as a tensor."""
    return torch.from_numpy(zeroed_bytes(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)


def shared_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, str]:
    """Return zeroed memory that other processes of this user can map, and the name by which they open it.

    As in `host_zeros`, memory is allocated on first use.

    Raises:
        OSError: if there is not enough memory.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    title = f"penstock-{secrets.token_hex(8)}"
    descriptor = os.memfd_create(title, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    memory = mmap.mmap(descriptor, num_bytes)
    tensor = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
    return tensor, f"{os.getpid()}/{descriptor}/{title}"


def free_host_memory() -> int:
    """The system's available memory, or the rest of the control group's limit if that is less."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available


def computes_in_bf16(cpu_flags: str | None = None) -> bool:
    """Whether the processor computes in bf16; `cpu_flags` are its feature words, from /proc/cpuinfo if None."""
    flags = Path("/proc/cpuinfo").read_text() if cpu_flags is None else cpu_flags
    return "amx_bf16" in flags or "avx512_bf16" in flags


def multiplies_bf16_matrices(cpu_flags: str | None = None) -> bool:
    """Whether the processor has an instruction for tiles of bf16 matrices; `cpu_flags` as in `choose_dtype`."""
    return "amx_bf16" in (Path("/proc/cpuinfo").read_text() if cpu_flags is None else cpu_flags)
