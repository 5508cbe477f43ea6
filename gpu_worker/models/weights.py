"""From a checkpoint's named tensors to the weights that blocks take."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.core.checkpoint.families.family import Shape
from penstock.core.checkpoint.source import Checkpoint
from penstock.gpu_worker.models.linear import PlainEmbedding, PlainLinear
from penstock.kernels.native.library import Library


class WeightReader(NamedTuple):
    """Reads each tensor of a checkpoint once, and fuses what is computed together."""

    read: Callable[[str], Tensor]  # by name; the result has any dtype, on any device
    shapes: Mapping[str, Shape]  # of all tensors
    is_bf16: bool  # whether all are stored in bf16
    dtype: torch.dtype  # of activations and KV, and of weights except as `library` allows
    device: torch.device  # where weights go
    library: Library | None = None
    """The native CPU kernels, if the model is made for them. They read bf16 weights directly, whatever the dtype: that
    halves what a step reads, and loses nothing."""
    checkpoint: Checkpoint | None = None
    """The source of the tensors, for a builder that reads it in its own way; None for random weights."""
    are_packed: bool = False
    """Whether matrices are read only to be packed. Then they are not copied if they need no conversion, and may be in
    the file's own memory."""

    def tensor(self, *names: str) -> Tensor:
        """The named tensors stacked, each copied straight to its place."""
        rows = [self.shapes[name][0] for name in names]
        fused = torch.empty((sum(rows), *self.shapes[names[0]][1:]), dtype=self.dtype, device=self.device)
        for part, name in zip(torch.split(fused, rows), names, strict=True):
            part.copy_(self.read(name))
        return fused

    def linear(self, *names: str) -> PlainLinear:
        """The stacked product of these names, with their biases if they have any."""
        weight = self._matrix(*(f"{name}.weight" for name in names))
        has_bias = f"{names[0]}.bias" in self.shapes
        return PlainLinear(weight, self.tensor(*(f"{name}.bias" for name in names)) if has_bias else None)

    def embedding(self, name: str, *, is_head: bool) -> PlainEmbedding:
        """An embedding; `is_head` if it is also the output matrix."""
        return PlainEmbedding((self._matrix if is_head else self.tensor)(f"{name}.weight"))

    def _matrix(self, *names: str) -> Tensor:
        if self.are_packed and len(names) == 1:
            return self.read(names[0]).to(self.device, self.dtype)
        return self.tensor(*names)
