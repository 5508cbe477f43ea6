"""A GPU for Triton's interpreter: the runner's CUDA branches and the Triton kernels, on CPU tensors.

Tensors say that they are CUDA tensors, so every operation takes its Triton kernel. A "graph" keeps the function
that was captured; a replay runs it again and copies what it made to where the first run put it, so whatever a
real graph would not see (another tensor, a number that was read on the host) is not seen here either.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.devices.cuda import CudaDevice
from penstock.gpu_worker.devices.device import Array, Download, Mark
from penstock.gpu_worker.startup import loaded

T = TypeVar("T")


def tensors_in(made: Any) -> list[Tensor]:
    """All tensors of nested tuples, in order."""
    if isinstance(made, Tensor):
        return [made]
    return [tensor for part in made for tensor in tensors_in(part)] if isinstance(made, Sequence) else []


class FakeCuda(CudaDevice):
    """What `CudaDevice` offers, at once."""

    name = "fake"

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.num_replays = 0
        self._cpu = CpuDevice(1)

    def upload(self, array: Array) -> Tensor:
        # As over the bus: the result is a tensor of its own, whose memory is aligned.
        return torch.from_numpy(array.copy())

    def upload_into(self, array: Array, target: Tensor) -> None:
        target.copy_(self.upload(array))

    def capture(self, step: Callable[[], T]) -> tuple[Callable[[], object], T]:
        result = step()

        def replay() -> None:
            self.num_replays += 1
            for kept, made in zip(tensors_in(result), tensors_in(step()), strict=True):
                kept.copy_(made)

        return replay, result

    def mark(self) -> Mark:
        return self._cpu.mark()

    def download(self, tensor: Tensor) -> Download:
        return self._cpu.download(tensor)


def use_fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Let `start` open the device above."""
    device = FakeCuda()
    monkeypatch.setattr(loaded, "open_device", lambda *_: device)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return device
