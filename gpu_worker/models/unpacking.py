"""Weights packed for the native kernels, made usable for torch's kernels without a second copy in memory."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.gpu_worker.models.linear import Linear
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.kernels.activation import Activation
from penstock.kernels.native.library import Library, PackedLinear


class WeightMemory:
    """Memory for one weight, as large as the largest one requested."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0, dtype=torch.bfloat16)

    def of(self, num_outputs: int, num_inputs: int) -> Tensor:
        """bf16[N, K]; overwritten by the next one."""
        if self._numbers.shape[0] < num_outputs * num_inputs:
            self._numbers = torch.empty(num_outputs * num_inputs, dtype=torch.bfloat16)
        return self._numbers[: num_outputs * num_inputs].view(num_outputs, num_inputs)


class UnpackingLinear(NamedTuple):
    """See `Linear`. Unpacks a packed bf16 weight for each product."""

    packed: PackedLinear
    library: Library
    memory: WeightMemory

    def __call__(self, x: Tensor, step: ForwardInputs | None) -> Tensor:
        weight = self.memory.of(self.packed.num_outputs, self.packed.num_inputs)
        self.library.unpack(self.packed, weight)
        bias = self.packed.plain_bias()
        return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))

    def of_activation(self, x: Tensor, activation: Activation, step: ForwardInputs) -> Tensor:
        return self(activation(x), step)

    def pack(self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False) -> PackedLinear:
        return self.packed


class PackedEmbedding(NamedTuple):
    """See `Embedding`. Rows of a packed output matrix."""

    packed: PackedLinear
    library: Library

    def __call__(self, step: ForwardInputs) -> Tensor:
        return self.library.rows(self.packed, step.input_ids.long()).bfloat16()

    def head(self) -> Linear:
        raise NotImplementedError("the output matrix is packed already")

    def pack(self, library: Library) -> PackedLinear:
        return self.packed
