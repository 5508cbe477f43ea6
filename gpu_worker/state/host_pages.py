"""Pages in the host's memory, and copies between them and the device's pages, in the order of the plans."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from penstock.gpu_worker.devices.device import Device, Mark
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.gpu_worker.state.transfers import DirectTransfers, StagedTransfers, Transfers
from penstock.ipc.messages import FROM_HOST, ON_DEVICE, TO_HOST, StepPlan

_NUM_MEASURED_PAGES = 16


class NoHostMemoryError(Exception):
    """The host tier's memory cannot be had; the message says why."""


class HostPages:
    """The host tier's memory: [num_pages, parts, elements], each page in one piece."""

    def __init__(self, kv: KVPool, num_pages: int, device: Device) -> None:
        """
        Raises:
            NoHostMemoryError: the memory cannot be had.
        """
        num_parts, _, num_elements = kv.blocks.shape
        self.num_pages = num_pages
        self.page_bytes = num_parts * num_elements * kv.blocks.element_size()
        num_bytes, free = num_pages * self.page_bytes, device.free_host_memory()
        if kv.blocks.device.type == "cpu":
            free -= kv.blocks.nbytes  # the pool's own memory is allocated as it is used
        if num_bytes > free:
            raise NoHostMemoryError(
                f"--host-kv-gib asks for {num_bytes / 2**30:.2f} GiB, {max(0, free) / 2**30:.2f} GiB are free"
            )
        try:
            self.memory = device.host_memory((num_pages, num_parts, num_elements), kv.blocks.dtype)
            lanes = device.lanes()
            self.transfers: Transfers = (
                DirectTransfers(kv.blocks, self.memory)
                if lanes is None
                else StagedTransfers(kv.blocks, self.memory, *lanes, device.upload)
            )
        except (RuntimeError, MemoryError) as error:
            raise NoHostMemoryError(str(error).split("\n")[0]) from None
        self._bytes = self.memory.view(torch.uint8).view(num_pages, -1).numpy()
        self._kv = kv
        self._device = device

    @classmethod
    def within(cls, num_bytes: int, kv: KVPool, device: Device) -> "HostPages":
        """As many pages as fit.

        Raises:
            NoHostMemoryError: not one fits, or the memory cannot be had.
        """
        num_pages = num_bytes // kv.page_bytes
        if not num_pages:
            raise NoHostMemoryError(f"no page fits {num_bytes / 2**20:.1f} MiB; raise --host-kv-gib")
        return cls(kv, num_pages, device)

    def copy(self, plan: StepPlan) -> None:
        """Begin a plan's copies: they count as done one after the other."""
        src, dst = (np.frombuffer(buffer, dtype=np.int32) for buffer in (plan.copy_src, plan.copy_dst))
        tiers = np.frombuffer(plan.copy_tiers, dtype=np.uint8)
        for begin, end in independent_runs(src.tolist(), dst.tolist(), tiers.tolist()):
            match int(tiers[begin]):
                case int(kind) if kind == TO_HOST:
                    self.transfers.to_host(src[begin:end], dst[begin:end])
                case int(kind) if kind == FROM_HOST:
                    self.transfers.from_host(src[begin:end], dst[begin:end])
                case _:
                    upload = self._device.upload
                    self._kv.copy_pages(upload(src[begin:end]), upload(dst[begin:end]))

    def take_times(self) -> tuple[int, int]:
        """Return the pages whose copies have ended since the last call, and the microseconds that these took."""
        return self.transfers.take_times()

    def copy_speed(self) -> int:
        """Measure the speed of copies in bytes per second. What the first pages hold stays as it is."""
        pages = np.arange(min(_NUM_MEASURED_PAGES, self.num_pages, self._kv.num_pages), dtype=np.int32)
        for _ in range(2):  # the first copy is slow, because it touches the memory for the first time
            self.transfers.to_host(pages, pages)
            self.transfers.from_host(pages, pages)
            self.transfers.mark().wait()
            num_pages, num_us = self.take_times()
        return int(num_pages * self.page_bytes * 1_000_000 / max(1, num_us))

    # --- for the disk tier below --------------------------------------------------------------

    def mark(self) -> Mark:
        """Mark the end of all copies from and to host pages that were begun so far."""
        return self.transfers.mark()

    def read_page(self, page: int, into: memoryview) -> None:
        """Copy a page's bytes."""
        into[:] = self._bytes[page].data

    def write_page(self, page: int, data: memoryview) -> None:
        """Overwrite a page with these bytes."""
        self._bytes[page] = np.frombuffer(data, dtype=np.uint8)


def independent_runs(src: Sequence[int], dst: Sequence[int], tiers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Divide copies into runs (begin, end) of one kind; the copies of a run may be made in any order."""
    begin = 0
    written: set[int] = set()
    for i, tier in enumerate(tiers):
        if tier != tiers[begin] or dst[i] in written or (tier == ON_DEVICE and src[i] in written):
            yield begin, i
            begin, written = i, set()
        if tier == ON_DEVICE and dst[i] in src[begin:i]:  # an earlier copy of the run reads this page
            yield begin, i
            begin, written = i, set()
        written.add(dst[i])
    if len(tiers):
        yield begin, len(tiers)
