"""An embedding that is also the output matrix, packed for the native kernels: others may look up its rows, too."""

from typing import NamedTuple

from torch import Tensor

from penstock.gpu_worker.models.linear import Linear
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.kernels.native.library import Library, PackedLinear


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
