"""From a checkpoint's tensors to the weights that blocks take."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.core.checkpoint.families.family import Shape
from penstock.core.checkpoint.source import Checkpoint
from penstock.core.checkpoint.weights import LinearSource, Source
from penstock.gpu_worker.models.linear import PlainEmbedding, PlainExperts, PlainLinear
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

    def tensor(self, source: Source, dtype: torch.dtype | None = None) -> Tensor:
        """A weight, in the reader's dtype if no other is given, each of its tensors copied straight to its place."""
        dtype = dtype or self.dtype
        shapes = [shape if not source.is_transposed else (*shape[:-2], *shape[:-3:-1]) for shape in source.shapes]
        rows = [shape[0] for shape in shapes]
        stack = torch.empty((sum(rows), *shapes[0][1:]), dtype=dtype, device=self.device)
        for part, name in zip(torch.split(stack, rows), source.names, strict=True):
            stored = self.read(name)
            part.copy_(stored.transpose(-1, -2) if source.is_transposed else stored)
        if source.num_stacked:
            stack = stack.view(source.num_stacked, -1, *stack.shape[1:])
        if source.order is not None:
            stack = stack.index_select(source.axis, torch.tensor(source.order, device=self.device))
        return stack

    def linear(self, source: LinearSource) -> PlainLinear:
        """A product, with its bias if it has one."""
        return PlainLinear(self._matrix(source.weight), None if source.bias is None else self.tensor(source.bias))

    def experts(self, source: LinearSource) -> PlainExperts:
        """The products of all experts."""
        weight, bias = self.tensor(source.weight), None if source.bias is None else self.tensor(source.bias)
        return PlainExperts(weight, bias)

    def embedding(self, source: Source, *, is_head: bool) -> PlainEmbedding:
        """An embedding; `is_head` if it is also the output matrix."""
        return PlainEmbedding((self._matrix if is_head else self.tensor)(source))

    def _matrix(self, source: Source) -> Tensor:
        is_stored_so = len(source.names) == 1 and not source.is_transposed and source.order is None
        if self.are_packed and is_stored_so:
            return self.read(source.names[0]).to(self.device, self.dtype)
        return self.tensor(source)
