"""The dense MLP."""

from typing import NamedTuple

from torch import Tensor

from penstock.gpu_worker.models.linear import Linear
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.kernels.activation import Activation
from penstock.models.description.decoder import DenseMLP


class MLPBlock(NamedTuple):
    """See `DenseMLP` (I is its size)."""

    mlp: DenseMLP
    gate_up: Linear  # [2 * I, H]: gate, then up; [I, H] if it is not gated
    down: Linear  # [H, I]

    def __call__(self, x: Tensor, inputs: ForwardInputs) -> Tensor:
        """[T, H] -> [T, H]; this rank's summand, if there are several."""
        inner = self.gate_up(x, inputs)
        if self.mlp.gate_scale != 1.0:
            inner[:, : self.mlp.size] *= self.mlp.gate_scale
        out = self.down.of_activation(inner, Activation(self.mlp.activation, self.mlp.is_gated), inputs)
        return out if self.mlp.out_scale == 1.0 else out * self.mlp.out_scale
