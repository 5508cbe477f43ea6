"""How fast this machine reads memory and multiplies matrices, measured without a model."""

import mmap
import time
from collections.abc import Callable

import torch

from penstock.kernels.native.build import built_library
from penstock.kernels.native.library import Library

_READ_BYTES = 512 << 20
_TRIES = 5


def read_rate(num_threads: int) -> float:
    """Bytes per second of reading uncached memory, on huge pages if there are any; the best of some tries.

    It uses the CPU kernels' own loop if they are available: that prefetches, and is a tenth faster than torch's sum.
    """
    path = built_library()
    torch.set_num_threads(num_threads)
    library = Library(path, num_threads) if path else None
    memory = mmap.mmap(-1, _READ_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.float32)
    data.fill_(1)
    return data.nbytes / _best(lambda: data.sum() if library is None else library.read(data))


def device_rates(
    device: torch.device, wait: Callable[[], None], num_bytes: int = 1 << 30, size: int = 8192
) -> tuple[float, float]:
    """(bytes per second of memory, operations per second of bf16 products) of a torch device.

    Args:
        device: the device to measure.
        wait: waits until the device has done all work.
        num_bytes: how many to copy; each byte is read and written.
        size: rows and columns of the square matrices.
    """
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    matrix = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(matrix)

    def timed(work: Callable[[], object]) -> float:
        def whole() -> None:
            work()
            wait()

        whole()  # do all one-time work
        return _best(whole)

    copied = timed(lambda: target.copy_(source))
    multiplied = timed(lambda: torch.mm(matrix, matrix, out=product))
    return 2 * num_bytes / copied, 2 * size**3 / multiplied


def _best(work: Callable[[], object]) -> float:
    """Seconds."""
    found = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)
