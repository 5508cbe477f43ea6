"""Interfaces for matrix products and embeddings, behind which weight formats, shards and adapters can differ."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.gpu_worker.models.model import ForwardInputs
from penstock.kernels.activation import Activation
from penstock.kernels.experts.experts import GroupedRows, grouped_linear
from penstock.kernels.native.library import Library, PackedLinear


class Linear(Protocol):
    """A product of activations with a weight. Only this object knows the weight's format."""

    def __call__(self, x: Tensor, step: ForwardInputs | None) -> Tensor:
        """[T, in] of the step's tokens -> [T, out]. For an output matrix `x` has only some rows, and `step` is None."""

    def of_activation(self, x: Tensor, activation: Activation, step: ForwardInputs) -> Tensor:
        """The product with activation(x) -> [T, out]."""

    def pack(self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False) -> PackedLinear:
        """Return the weight packed for the native CPU kernels; the options are those of `Library.pack`."""


class ExpertLinear(Protocol):
    """A mixture's products, with one weight [out, in] for each expert. Only this object knows the weights' format.

    `grouped` says which token each of the T * k rows belongs to, and the order of the rows.
    """

    def of_tokens(self, x: Tensor, grouped: GroupedRows, step: ForwardInputs, scales: Tensor | None = None) -> Tensor:
        """[T, in] -> [T * k, out]; each row's input is multiplied by its entry in `scales`, fp32[T, k]."""

    def of_activation(self, x: Tensor, activation: Activation, grouped: GroupedRows, step: ForwardInputs) -> Tensor:
        """The products with activation(x), where `x` is an earlier result -> [T * k, out]."""

    def pack(
        self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False
    ) -> tuple[PackedLinear, ...]:
        """Return each expert's weight packed for the native CPU kernels, as `Linear.pack` does."""


class Embedding(Protocol):
    """A vector for each token id."""

    def __call__(self, step: ForwardInputs) -> Tensor:
        """[T, H] of the step's tokens."""

    def head(self) -> Linear:
        """The same weights as an output matrix, for models with tied embeddings."""

    def pack(self, library: Library) -> Tensor | PackedLinear:
        """Return the weights for the native CPU kernels: fp32 or bf16 [V, H], or packed as an output matrix."""


class PlainLinear(NamedTuple):
    """x @ weight^T + bias, in the dtype of both."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]

    def __call__(self, x: Tensor, step: ForwardInputs | None) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def of_activation(self, x: Tensor, activation: Activation, step: ForwardInputs) -> Tensor:
        return self(activation(x), step)

    def pack(self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False) -> PackedLinear:
        return library.pack(self.weight, self.bias, interleaved=interleaved, rounds_inputs=rounds_inputs)


class JoinedLinear(NamedTuple):
    """Products in different formats whose outputs are concatenated. In most models they are a single matrix."""

    parts: tuple[Linear, ...]

    def __call__(self, x: Tensor, step: ForwardInputs | None) -> Tensor:
        return torch.cat([part(x, step) for part in self.parts], dim=-1)

    def of_activation(self, x: Tensor, activation: Activation, step: ForwardInputs) -> Tensor:
        return self(activation(x), step)

    def pack(self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False) -> PackedLinear:
        raise NotImplementedError("each part is packed by itself")


class PlainExperts(NamedTuple):
    """x @ weight[e]^T + bias[e], in the dtype of both."""

    weight: Tensor  # [E, out, in]
    bias: Tensor | None = None  # [E, out]

    def of_tokens(self, x: Tensor, grouped: GroupedRows, step: ForwardInputs, scales: Tensor | None = None) -> Tensor:
        return grouped_linear(x, grouped, self.weight, self.bias, of_tokens=True, scales=scales)

    def of_activation(self, x: Tensor, activation: Activation, grouped: GroupedRows, step: ForwardInputs) -> Tensor:
        return grouped_linear(activation(x), grouped, self.weight, self.bias)

    def pack(
        self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False
    ) -> tuple[PackedLinear, ...]:
        biases = self.bias if self.bias is not None else [None] * len(self.weight)
        return tuple(
            library.pack(weight, bias, interleaved=interleaved, rounds_inputs=rounds_inputs)
            for weight, bias in zip(self.weight, biases, strict=True)
        )


class PlainEmbedding(NamedTuple):
    """Rows of a matrix."""

    weight: Tensor  # [V, H]

    def __call__(self, step: ForwardInputs) -> Tensor:
        return functional.embedding(step.input_ids, self.weight)

    def head(self) -> PlainLinear:
        return PlainLinear(self.weight)

    def pack(self, library: Library) -> Tensor:
        return self.weight
