"""The one seam to the hardware: where tensors live, how arrays get there and how results come back."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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


class Graphs(Protocol):
    """A device that can record what is launched, and launch it again at once."""

    def capture(self, step: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Record what `step` launches; all graphs of a device share one memory pool.

        Returns:
            (replay, the step's result): each replay fills the result's tensors anew.
        """

    def upload_into(self, array: Array, target: Tensor) -> None:
        """Bring a host array to a tensor that is there already."""


class MemoryUse(NamedTuple):
    """What a device's memory was used for; bytes."""

    total: int
    in_use: int  # by everything, before a step
    peak: int  # more at the step's worst moment


class Device(Protocol):
    """What a worker needs of a device."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors are made."""

    @property
    def name(self) -> str:
        """What it is, for people."""

    @property
    def library(self) -> Library | None:
        """The CPU's own kernels, where they are used."""

    @property
    def graphs(self) -> Graphs | None:
        """Captures steps, if the device can."""

    @property
    def compiles_launches(self) -> bool:
        """Whether a launch may first compile a kernel, for the kinds of its arguments.

        Then tables keep their widths, and all kinds are met before the first request.
        """

    @property
    def frees_memory_late(self) -> bool:
        """Whether memory of a process that has died comes back only after a while."""

    def adapt_to(self, step_bytes: int) -> None:
        """A step of the model reads so many bytes of weights."""

    def measure(self, step: Callable[[], None]) -> MemoryUse | None:
        """Run a step, to learn what memory it takes; None, and no run, if the memory is not the device's own."""

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
