"""Gated activations: act(gate) * up over a fused [T, 2 * I] matrix product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import ceil_div


@triton.jit
def gated_kernel(x_ptr, out_ptr, width, stride_xt, stride_ot, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T, ceil(I / BLOCK)). KIND: 0 SiLU, 1 GELU by erf, 2 GELU by its tanh approximation."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(x_ptr + token * stride_xt + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_xt + width + cols, mask=mask, other=0.0).to(tl.float32)
    if KIND == 0:
        act = gate / (1.0 + tl.exp(-gate))
    elif KIND == 1:
        act = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        # 0.5 * (1 + tanh(x)) = 1 - 1 / (exp(2x) + 1); past 80 it is 1 in fp32.
        act = gate * (1.0 - 1.0 / (tl.exp(tl.minimum(twice, 80.0)) + 1.0))
    out_ptrs = out_ptr + token * stride_ot + cols
    tl.store(out_ptrs, (act * up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    """[T, 2 * I] -> [T, I]."""
    return _gated(gate_up, 0)


def gelu_mul_triton(gate_up: Tensor, tanh: bool) -> Tensor:
    """[T, 2 * I] -> [T, I]."""
    return _gated(gate_up, 2 if tanh else 1)


def _gated(gate_up: Tensor, kind: int) -> Tensor:
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        block = 1024
        grid = (num_tokens, ceil_div(width, block))
        gated_kernel[grid](gate_up, out, width, gate_up.stride(0), out.stride(0), KIND=kind, BLOCK=block, num_warps=4)
    return out
