"""The one seam to the hardware: where tensors live, how arrays get there and how results come back."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.core.config import ConfigError
from penstock.core.config.options import DTypeName
from penstock.kernels.native.library import Library

IntArray = npt.NDArray[np.integer]
Array = npt.NDArray[np.integer] | npt.NDArray[np.floating]
T = TypeVar("T")


class Download(Protocol):
    """Tokens on their way to the host."""

    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> bytes:
        """The int32 array's bytes; blocks until the device has made them."""


class Mark(Protocol):
    """A point in the device's work, to tell times between."""

    def us_since(self, earlier: "Mark") -> int:
        """Microseconds of the device's time from `earlier` to this; both must have been passed."""

    def is_passed(self) -> bool:
        """Whether the device has come this far."""

    def wait(self) -> None:
        """Block until it has."""


class Device(Protocol):
    """What the runner needs of a device."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors are made."""

    def upload(self, array: Array) -> Tensor:
        """A host array as a tensor of the same dtype on the device; the array may be reused afterwards."""

    def mark(self) -> Mark:
        """The end of what was launched so far."""

    def download(self, tensor: Tensor) -> Download:
        """Start to bring an int32 tensor to the host."""

    def free_memory(self) -> int:
        """Bytes that could be taken now."""

    def memory_use(self) -> tuple[int, int]:
        """Bytes that are in use, and all."""


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

    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.library: Library | None = None  # this processor's own kernels, where they are used

    def upload(self, array: Array) -> Tensor:
        return torch.from_numpy(array.copy())  # a received buffer is read-only, which torch cannot express

    def mark(self) -> Mark:
        return _ClockMark()

    def download(self, tensor: Tensor) -> Download:
        return _Ready(tensor)

    def free_memory(self) -> int:
        """The system's available memory, or what the process group's limit leaves if that is less."""
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
        limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
        if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
            available = min(available, max(0, int(text) - int(used.read_text())))
        return available

    def memory_use(self) -> tuple[int, int]:
        """Bytes that this process holds, and those that the machine has."""
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return num_pages * os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _CudaDownload:
    def __init__(self, host: Tensor, event: torch.cuda.Event) -> None:
        self._host = host
        self._event = event

    def is_ready(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> bytes:
        self._event.synchronize()
        return self._host.numpy().tobytes()


class _CudaMark:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def us_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, _CudaMark)
        return int(earlier._event.elapsed_time(self._event) * 1e3)

    def is_passed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class CudaDevice:
    """One NVIDIA GPU. Results leave on a side stream, with one event a step; the main stream never waits."""

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self._results = torch.cuda.Stream()
        self._graph_pool: Any = None  # torch's handle; made with the first capture

    def upload(self, array: Array) -> Tensor:
        return _pinned(array).to(self.torch_device, non_blocking=True)

    def upload_into(self, array: Array, target: Tensor) -> None:
        """Bring a host array to a tensor that is there already."""
        # The allocator of pinned memory keeps the copy's source until the copy is done.
        target.copy_(_pinned(array), non_blocking=True)

    def capture(self, step: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Record what `step` launches as a CUDA graph; all graphs of this device share one memory pool.

        Returns:
            (replay, the step's result): each replay fills the result's tensors anew.
        """
        step()  # compiles kernels and makes library handles and workspaces, which a capture cannot
        torch.cuda.synchronize()
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            result = step()
        return graph.replay, result

    def mark(self) -> Mark:
        return _CudaMark()

    def download(self, tensor: Tensor) -> Download:
        made = torch.cuda.Event()
        made.record()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        event = torch.cuda.Event()
        with torch.cuda.stream(self._results):
            self._results.wait_event(made)
            host.copy_(tensor, non_blocking=True)
            event.record()
        tensor.record_stream(self._results)
        return _CudaDownload(host, event)

    def free_memory(self) -> int:
        free, _ = torch.cuda.mem_get_info()
        return free

    def memory_use(self) -> tuple[int, int]:
        """Bytes of the GPU that are taken, by whomever, and all of them."""
        free, total = torch.cuda.mem_get_info()
        return total - free, total


def _pinned(array: Array) -> Tensor:
    host = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, pin_memory=True)
    host.numpy()[...] = array
    return host


def open_device(wanted: str, num_threads: int) -> CpuDevice | CudaDevice:
    """The device of an option's value.

    Args:
        wanted: `--device`; or `auto:N`, the Nth GPU if there are any.
        num_threads: of a CPU.

    Raises:
        ConfigError: if there is no such device.
    """
    kind, _, number = wanted.partition(":")
    name = wanted
    if kind == "auto":
        name = f"cuda:{number or 0}" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice(num_threads)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type != "cuda":
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, got {wanted!r}")
    index = device.index or 0
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise ConfigError(f"--device {wanted}: this machine offers {torch.cuda.device_count()} CUDA devices")
    return CudaDevice(index)


def choose_dtype(wanted: DTypeName, checkpoint: str, device: torch.device, cpu_flags: str | None = None) -> torch.dtype:
    """The dtype of weights, activations and KV.

    `auto` is the checkpoint's on a GPU. On a CPU it is bfloat16 for a half-precision checkpoint where the
    processor computes in it, else float32; float16 has no fast path there.

    Args:
        wanted: the option.
        checkpoint: the checkpoint's own dtype.
        device: where it runs.
        cpu_flags: the processor's feature words; read from /proc/cpuinfo if None.

    Raises:
        ConfigError: for float16 asked for on a CPU, or a checkpoint's dtype that is none of ours.
    """
    if wanted == "auto":
        if checkpoint not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"the checkpoint's dtype {checkpoint!r} is not supported; name one with --dtype")
        if device.type == "cuda":
            return _torch_dtype(checkpoint)
        return torch.bfloat16 if checkpoint == "bfloat16" and computes_in_bf16(cpu_flags) else torch.float32
    if wanted == "float16" and device.type == "cpu":
        raise ConfigError("--dtype float16 is slow on a CPU and not supported there; use bfloat16, float32 or auto")
    return _torch_dtype(wanted)


def computes_in_bf16(cpu_flags: str | None = None) -> bool:
    """Whether the processor multiplies in bf16; `cpu_flags` as in `choose_dtype`."""
    flags = Path("/proc/cpuinfo").read_text() if cpu_flags is None else cpu_flags
    return "amx_bf16" in flags or "avx512_bf16" in flags


def multiplies_bf16_matrices(cpu_flags: str | None = None) -> bool:
    """Whether the processor has an instruction for tiles of bf16 matrices; `cpu_flags` as in `choose_dtype`."""
    return "amx_bf16" in (Path("/proc/cpuinfo").read_text() if cpu_flags is None else cpu_flags)


def _torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
