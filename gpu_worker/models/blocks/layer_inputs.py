"""Vectors for each layer and token, in addition to the residual stream."""

from typing import NamedTuple

from torch import Tensor

from penstock.gpu_worker.models.linear import Embedding, Linear
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.kernels.activation import activation
from penstock.kernels.norms import NormWeights, norm
from penstock.models.description.decoder import LayerInputs


class LayerInputsBlock(NamedTuple):
    """See `LayerInputs` (P is the size of each vector, L the number of layers)."""

    inputs: LayerInputs
    table: Embedding  # [V, L * P]
    projection: Linear  # [L * P, H]
    norm: NormWeights

    def __call__(self, embedded: Tensor, inputs: ForwardInputs) -> Tensor:
        """[T, H] -> [T, L, P]"""
        size = self.inputs.size
        projected = self.projection(embedded, inputs).mul_(embedded.shape[1] ** -0.5).unflatten(1, (-1, size))
        if inputs.images is not None and inputs.images.places is not None:
            ids = inputs.input_ids.index_fill(0, inputs.images.places, self.inputs.image_row)
            inputs = inputs._replace(input_ids=ids)
        of_tokens = self.table(inputs).mul_(size**0.5).view(projected.shape)
        return norm(projected, self.norm).add_(of_tokens).mul_(2**-0.5)


class LayerInputBlock(NamedTuple):
    """What a layer does with its vector."""

    inputs: LayerInputs
    down: Linear  # [P, H]
    up: Linear  # [H, P]
    norm: NormWeights  # of what is added to the residual stream

    def __call__(self, x: Tensor, its_input: Tensor, inputs: ForwardInputs) -> Tensor:
        """[T, H] and [T, P] -> [T, H], which is then normed and added."""
        return self.up(activation(self.down(x, inputs), self.inputs.activation).mul_(its_input), inputs)
