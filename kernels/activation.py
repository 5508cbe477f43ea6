"""Activations of the feed-forward block, alone and gated: act(gate) * up, from one fused matrix product."""

from typing import Literal, NamedTuple

from torch import Tensor
from torch.nn import functional

ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"]
"""`relu2` is the square of ReLU (So et al., 2021). `clamped_swiglu` is gpt-oss's, and only works as a gate: with
g = min(gate, 7) and u = up clamped to [-7, 7], it is (u + 1) * g * sigmoid(1.702 g)."""


class Activation(NamedTuple):
    """The activation of an MLP, between its products."""

    kind: ActivationKind
    is_gated: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        """[T, 2 * I], or [T, I] if it is not gated, -> [T, I]."""
        return gated_activation(x, self.kind) if self.is_gated else activation(x, self.kind)


def gated_activation(gate_up: Tensor, kind: ActivationKind) -> Tensor:
    """The activation of the gate times the up projection.

    Args:
        gate_up: [T, 2 * I], the gate in the first half of each row, the up projection in the second.
        kind: of the activation.

    Returns:
        [T, I].
    """
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be [T, 2 * I], got {tuple(gate_up.shape)}")
    if gate_up.is_cuda:
        from penstock.kernels.triton.activation import gated_activation_triton

        return gated_activation_triton(gate_up, kind)
    gate, up = gate_up.chunk(2, dim=-1)
    if kind == "clamped_swiglu":
        gate = gate.clamp(max=7.0)
        return (gate * 1.702).sigmoid_().mul_(gate).mul_(up.clamp(-7.0, 7.0).add_(1.0))
    return _activated(gate, kind).mul_(up)


def activation(x: Tensor, kind: ActivationKind) -> Tensor:
    """The activation alone.

    Args:
        x: [T, I].
        kind: any but "clamped_swiglu", which needs a gate.

    Returns:
        [T, I], a new tensor.
    """
    if x.ndim != 2 or kind == "clamped_swiglu":
        raise ValueError(f"{kind} of {tuple(x.shape)}: x must be [T, I], and the activation one that needs no gate")
    if x.is_cuda:
        from penstock.kernels.triton.activation import activation_triton

        return activation_triton(x, kind)
    return _activated(x, kind)


def _activated(x: Tensor, kind: ActivationKind) -> Tensor:
    if kind == "silu":
        return functional.silu(x)
    if kind == "gelu":
        return functional.gelu(x)
    if kind == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    return x.relu() if kind == "relu" else x.relu().square_()


def gated_activation_reference(gate_up: Tensor, kind: ActivationKind) -> Tensor:
    """The formula in fp32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if kind == "clamped_swiglu":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
        return (up * gate / (1 + (-1.702 * gate).exp())).to(gate_up.dtype)
    return (activation_reference(gate, kind) * up).to(gate_up.dtype)


def activation_reference(x: Tensor, kind: ActivationKind) -> Tensor:
    """The formula in fp32, rounded once."""
    x32 = x.float()
    if kind == "silu":
        activated = x32 / (1 + (-x32).exp())
    elif kind == "gelu":
        activated = 0.5 * x32 * (1 + (x32 * 0.5**0.5).erf())
    elif kind == "gelu_tanh":
        activated = 0.5 * x32 * (1 + ((2 / 3.141592653589793) ** 0.5 * (x32 + 0.044715 * x32**3)).tanh())
    else:
        activated = x32.clamp(min=0) ** (2 if kind == "relu2" else 1)
    return activated.to(x.dtype)
