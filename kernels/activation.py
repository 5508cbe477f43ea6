"""Gated activations of the feed-forward block: act(gate) * up, from the output of one fused matrix product."""

from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU-gated product.

    Args:
        gate_up: [T, 2 * I], the gate in the first half of each row, the up projection in the second.

    Returns:
        [T, I].
    """
    _check(gate_up)
    if gate_up.is_cuda:
        from penstock.kernels.triton.activation import silu_mul_triton

        return silu_mul_triton(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gelu_mul(gate_up: Tensor, tanh: bool) -> Tensor:
    """GELU-gated product; shapes as in `silu_mul`. `tanh` picks the tanh approximation over the exact form."""
    _check(gate_up)
    if gate_up.is_cuda:
        from penstock.kernels.triton.activation import gelu_mul_triton

        return gelu_mul_triton(gate_up, tanh)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh" if tanh else "none").mul_(up)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """The formula in fp32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + (-gate).exp()) * up).to(gate_up.dtype)


def gelu_mul_reference(gate_up: Tensor, tanh: bool) -> Tensor:
    """The formula in fp32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    activated: Tensor
    if tanh:
        activated = 0.5 * gate * (1 + ((2 / 3.141592653589793) ** 0.5 * (gate + 0.044715 * gate**3)).tanh())
    else:
        activated = 0.5 * gate * (1 + (gate * 0.5**0.5).erf())
    return (activated * up).to(gate_up.dtype)


def _check(gate_up: Tensor) -> None:
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be [T, 2 * I], got {tuple(gate_up.shape)}")
