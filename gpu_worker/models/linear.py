"""The matrix products of a model behind one seam, where other weight formats and sharding can enter."""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional


class Linear(NamedTuple):
    """x @ weight^T + bias."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]"""
        return functional.linear(x, self.weight, self.bias)
