"""Matrix products and embeddings behind one interface, where other weight formats, shards and adapters can enter."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.gpu_worker.models.model import ForwardInputs
from penstock.kernels.activation import Activation
from penstock.kernels.experts import GroupedRows, grouped_linear
from penstock.kernels.native.library import Library, PackedLinear


class Linear(Protocol):
    """A product of activations with a weight, whose format only this object knows."""

    def __call__(self, x: Tensor, step: ForwardInputs | None) -> Tensor:
        """[T, in] of the step's tokens -> [T, out]. An output matrix multiplies some of the rows, without a step."""

    def of_activation(self, x: Tensor, activation: Activation, step: ForwardInputs) -> Tensor:
        """What the activation makes of `x` -> [T, out]."""

    def pack(self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False) -> PackedLinear:
        """Return its form for the native CPU kernels; the options are those of `Library.pack`."""


class ExpertLinear(Protocol):
    """A mixture's products, one weight [out, in] for each expert, whose format only this object knows.

    `grouped` says which token's input each of the T * k rows has, and in which order rows are kept.
    """

    def of_tokens(self, x: Tensor, grouped: GroupedRows, step: ForwardInputs, scales: Tensor | None = None) -> Tensor:
        """[T, in] -> [T * k, out]; each row's input is multiplied by its number in `scales`, fp32[T, k]."""

    def of_activation(self, x: Tensor, activation: Activation, grouped: GroupedRows, step: ForwardInputs) -> Tensor:
        """What the activation makes of an earlier result -> [T * k, out]."""

    def pack(
        self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False
    ) -> tuple[PackedLinear, ...]:
        """Return each expert's form for the native CPU kernels, as `Linear.pack`."""


class Embedding(Protocol):
    """A vector for each token id."""

    def __call__(self, step: ForwardInputs) -> Tensor:
        """[T, H] of the step's tokens."""

    def head(self) -> Linear:
        """The same weights as an output matrix, for models that tie the two."""

    def pack(self, library: Library) -> Tensor | PackedLinear:
        """Return its form for the native CPU kernels: fp32 or bf16 [V, H], or packed as an output matrix."""


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
    """Products that fill one output, each in its own format: unlike parts of what is one matrix in most models."""

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
