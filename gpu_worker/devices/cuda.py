"""An NVIDIA GPU as a device."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.gpu_worker.devices.cpu import free_host_memory, zeroed_bytes
from penstock.gpu_worker.devices.device import Array, Download, Graphs, Int32Array, Lane, Mark, MemoryUse, T
from penstock.kernels.native.library import Library


class _CudaDownload:
    def __init__(self, host: Tensor, event: torch.cuda.Event) -> None:
        self._host = host
        self._event = event

    def is_ready(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> bytes:
        _wait_for(self._event)
        return self._host.numpy().tobytes()


class _CudaMark:
    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def us_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, _CudaMark)
        return int(earlier.event.elapsed_time(self.event) * 1e3)

    def is_passed(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        _wait_for(self.event)


class _CudaLane:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Mark:
        with torch.cuda.stream(self._stream):
            return _CudaMark()

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        self._stream.wait_event(mark.event)


class CudaDevice:
    """One NVIDIA GPU. Results leave on a side stream, with one event per step; the main stream never waits."""

    library: Library | None = None
    compiles_launches = True
    frees_memory_late = True

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self._results = torch.cuda.Stream()
        self._graph_pool: Any = None  # torch's handle; made with the first capture

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    @property
    def graphs(self) -> Graphs | None:
        return self

    def adapt_to(self, step_bytes: int) -> None:
        pass

    def give_back(self) -> None:
        pass  # measuring the free memory does so already

    def measure(self, step: Callable[[], None]) -> MemoryUse | None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved() - reserved
        torch.cuda.empty_cache()
        return MemoryUse(total, total - free, peak)

    def upload(self, array: Array) -> Tensor:
        return _pinned(array).to(self.torch_device, non_blocking=True)

    def upload_into(self, array: Array, target: Tensor) -> None:
        # The pinned memory allocator keeps the copy's source until the copy is done.
        target.copy_(_pinned(array), non_blocking=True)

    def capture(self, step: Callable[[], T]) -> tuple[Callable[[], object], T]:
        step()  # compiles kernels and creates library handles and workspaces, which a capture cannot do
        torch.cuda.synchronize()
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            result = step()
        return graph.replay, result

    def write_runs(
        self, table: Tensor, rows: Int32Array, starts: Int32Array, counts: Int32Array, values: Int32Array
    ) -> None:
        from penstock.kernels.triton.row_updates import write_runs_triton

        # One upload, because all arrays are adjacent in one buffer.
        packed, n = self.upload(np.concatenate((rows, starts, counts, values))), rows.shape[0]
        write_runs_triton(table, packed[:n], packed[n : 2 * n], packed[2 * n : 3 * n], packed[3 * n :])

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

    def lanes(self) -> tuple[Lane, Lane] | None:
        return _CudaLane(torch.cuda.current_stream()), _CudaLane(torch.cuda.Stream())

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        octets = zeroed_bytes(math.prod(shape) * dtype.itemsize)
        # torch rounds pinned memory up to powers of two, which would waste up to half of it.
        error = torch.cuda.cudart().cudaHostRegister(octets.ctypes.data, octets.nbytes, 0)
        if int(error):
            raise RuntimeError(f"the CUDA driver does not pin {octets.nbytes / 2**30:.2f} GiB (error {int(error)})")
        # Else the driver would take later memory at the same address for this one, and copy from pages that are gone.
        weakref.finalize(octets, _unpin, octets.ctypes.data, self.torch_device).atexit = False
        return torch.from_numpy(octets).view(dtype).view(shape)

    def free_host_memory(self) -> int:
        return free_host_memory()

    def free_memory(self) -> int:
        free, _ = torch.cuda.mem_get_info()
        return free

    def memory_use(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info()
        return total - free, total


def _wait_for(event: torch.cuda.Event) -> None:
    # Other threads wait, too. Their current device is the first GPU, where waiting would make a context.
    with torch.cuda.device(event.device):
        event.synchronize()


def _unpin(address: int, device: torch.device) -> None:
    """Give back host memory, just before it is freed."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)


def _pinned(array: Array) -> Tensor:
    host = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, pin_memory=True)
    host.numpy()[...] = array
    return host
