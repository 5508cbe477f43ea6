"""The only interface to the hardware: where tensors live, how arrays get there, and how results come back."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.native.library import Library

IntArray = npt.NDArray[np.integer]
Int32Array = npt.NDArray[np.int32]
Array = npt.NDArray[np.integer] | npt.NDArray[np.floating]
T = TypeVar("T")


class Download(Protocol):
    """Tokens on their way to the host."""

    def is_ready(self) -> bool:
        """Whether `wait` would return immediately."""

    def wait(self) -> bytes:
        """The int32 array's bytes; blocks until the device has computed them."""


class Mark(Protocol):
    """A point in the device's work, for measuring time."""

    def us_since(self, earlier: "Mark") -> int:
        """Microseconds of device time from `earlier` to this mark. The device must have passed both."""

    def is_passed(self) -> bool:
        """Whether the device has passed this mark."""

    def wait(self) -> None:
        """Block until the device has passed this mark."""


class Graphs(Protocol):
    """A device that can record launches, and replay them all at once."""

    def capture(self, step: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Record what `step` launches; all graphs of a device share one memory pool.

        Returns:
            (replay, the step's result): each replay fills the result's tensors anew.
        """

    def upload_into(self, array: Array, target: Tensor) -> None:
        """Copy a host array into an existing tensor."""


class Lane(Protocol):
    """A queue of device work that runs in order, beside other lanes."""

    def run(self, work: Callable[[], None]) -> None:
        """Launch work in this lane."""

    def mark(self) -> Mark:
        """Mark the end of what was launched in this lane so far."""

    def wait(self, mark: Mark) -> None:
        """Make later launches in this lane wait until `mark`, of any lane, is passed. The host does not wait."""


class MemoryUse(NamedTuple):
    """How a device's memory was used, in bytes."""

    total: int
    in_use: int  # by everything, before the step
    peak: int  # additionally, at the step's peak; all that was taken from the device, with what lies between tensors


class Device(Protocol):
    """What a worker needs from a device."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors are created."""

    @property
    def name(self) -> str:
        """A readable name."""

    @property
    def library(self) -> Library | None:
        """The native CPU kernels, if they are used."""

    @property
    def graphs(self) -> Graphs | None:
        """Captures steps, if the device can."""

    @property
    def compiles_launches(self) -> bool:
        """Whether a launch may have to compile a kernel for its kinds of arguments first.

        If so, tables keep their widths, and all variants are compiled before the first request.
        """

    @property
    def frees_memory_late(self) -> bool:
        """Whether the memory of a process that has died comes back only after a while."""

    def adapt_to(self, step_bytes: int) -> None:
        """Called with the bytes of weights that one step of the model reads."""

    def give_back(self) -> None:
        """Called when the weights are loaded: return memory to the system that only loading needed."""

    def measure(self, step: Callable[[], None]) -> MemoryUse | None:
        """Run a step to measure its memory. None, without running it, if the device has no memory of its own."""

    def upload(self, array: Array) -> Tensor:
        """Return a host array as a tensor of the same dtype on the device; the array may be reused afterwards."""

    def write_runs(
        self, table: Tensor, rows: Int32Array, starts: Int32Array, counts: Int32Array, values: Int32Array
    ) -> None:
        """`table[rows[i], starts[i] : starts[i] + counts[i]] = ` the i-th run of `values`.

        Args:
            table: int32[R, L] on the device, written; rows are contiguous.
            rows: int32[C], distinct, or at least with disjoint runs.
            starts: int32[C], first column of each run.
            counts: int32[C], length of each run, may be 0.
            values: int32[sum(counts)], the runs one after the other.
        """

    def mark(self) -> Mark:
        """Mark the end of what was launched so far."""

    def download(self, tensor: Tensor) -> Download:
        """Start copying an int32 tensor to the host."""

    def lanes(self) -> tuple[Lane, Lane] | None:
        """Return the lane of steps, and one for copies beside them; None if all work is done at once and in place."""

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of the host that a device with lanes can read and write by itself.

        Raises:
            RuntimeError, MemoryError: there is not enough.
        """

    def free_host_memory(self) -> int:
        """Bytes of the host's memory that are free now."""

    def free_memory(self) -> int:
        """Bytes that are free now."""

    def memory_use(self) -> tuple[int, int]:
        """Used and total bytes."""
