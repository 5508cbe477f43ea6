"""Matrix products and embeddings behind one seam, where other formats of weights, shards and adapters can enter."""

from typing import NamedTuple, Protocol

from torch import Tensor
from torch.nn import functional

from penstock.gpu_worker.models.model import ForwardInputs
from penstock.kernels.native.library import Library, PackedLinear


class Linear(Protocol):
    """A product of activations with a weight that it alone knows the form of."""

    def __call__(self, x: Tensor, step: ForwardInputs | None) -> Tensor:
        """[T, in] of the step's tokens -> [T, out]; an output matrix multiplies some rows of them, without a step."""

    def pack(self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False) -> PackedLinear:
        """Its form for the CPU's own kernels; the options are those of `Library.pack`."""


class Embedding(Protocol):
    """A vector for each token id."""

    def __call__(self, step: ForwardInputs) -> Tensor:
        """[T, H] of the step's tokens."""

    def head(self) -> Linear:
        """The same weights as the output matrix, where a model ties the two."""

    def table(self) -> Tensor:
        """fp32 or bf16 [V, H], for the CPU's own kernels."""


class PlainLinear(NamedTuple):
    """x @ weight^T + bias, in the dtype of both."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]

    def __call__(self, x: Tensor, step: ForwardInputs | None) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def pack(self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False) -> PackedLinear:
        return library.pack(self.weight, self.bias, interleaved=interleaved, rounds_inputs=rounds_inputs)


class PlainEmbedding(NamedTuple):
    """Rows of a matrix."""

    weight: Tensor  # [V, H]

    def __call__(self, step: ForwardInputs) -> Tensor:
        return functional.embedding(step.input_ids, self.weight)

    def head(self) -> PlainLinear:
        return PlainLinear(self.weight)

    def table(self) -> Tensor:
        return self.weight
