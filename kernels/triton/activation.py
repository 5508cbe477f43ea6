"""Activations over [T, I], and gated ones over a fused [T, 2 * I] matrix product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.activation import ActivationKind
from penstock.kernels.triton.device import ceil_div


@triton.jit
def activated(x, KIND: tl.constexpr):
    """The activation of fp32 values; NaN stays NaN."""
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        twice = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        # 0.5 * (1 + tanh(x)) = 1 - 1 / (exp(2x) + 1); past 80 it is 1 in fp32.
        y = x * (1.0 - 1.0 / (tl.exp(tl.minimum(twice, 80.0)) + 1.0))
    else:
        y = tl.where(x < 0.0, 0.0, x)
        if KIND == "relu2":
            y = y * y
    return y


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """The gated activation of fp32 values; NaN stays NaN."""
    if KIND == "clamped_swiglu":
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        y = (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))
    else:
        y = activated(gate, KIND) * up
    return y


@triton.jit
def activation_kernel(
    x_ptr, out_ptr, width, stride_xt, stride_ot, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (T, ceil(I / BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    x = tl.load(x_ptr + token * stride_xt + cols, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + token * stride_xt + width + cols, mask=mask, other=0.0).to(tl.float32)
        y = gated(x, up, KIND)
    else:
        y = activated(x, KIND)
    tl.store(out_ptr + token * stride_ot + cols, y.to(out_ptr.dtype.element_ty), mask=mask)


def gated_activation_triton(gate_up: Tensor, kind: ActivationKind) -> Tensor:
    """[T, 2 * I] -> [T, I]."""
    return _launch(gate_up, gate_up.shape[1] // 2, kind, is_gated=True)


def activation_triton(x: Tensor, kind: ActivationKind) -> Tensor:
    """[T, I] -> [T, I]."""
    return _launch(x, x.shape[1], kind, is_gated=False)


def _launch(x: Tensor, width: int, kind: ActivationKind, *, is_gated: bool) -> Tensor:
    num_tokens = x.shape[0]
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if num_tokens:
        block = 1024
        activation_kernel[(num_tokens, ceil_div(width, block))](
            x, out, width, x.stride(0), out.stride(0), KIND=kind, GATED=is_gated, BLOCK=block, num_warps=4
        )
    return out
