"""The dense MLP."""

from typing import NamedTuple

from torch import Tensor

from penstock.core.checkpoint.decoder import DenseMLP
from penstock.gpu_worker.models.linear import Linear
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.kernels.activation import activation, gated_activation


class MLPBlock(NamedTuple):
    """See `DenseMLP` (I its size)."""

    mlp: DenseMLP
    gate_up: Linear  # [2 * I, H]: gate, then up; [I, H] if it is not gated
    down: Linear  # [H, I]

    def __call__(self, x: Tensor, inputs: ForwardInputs) -> Tensor:
        """[T, H] -> [T, H]"""
        inner = self.gate_up(x, inputs)
        activated = (gated_activation if self.mlp.is_gated else activation)(inner, self.mlp.activation)
        return self.down(activated, inputs)
