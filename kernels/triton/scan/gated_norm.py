"""The gate after a scan, with the norm before or after the gate."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.scan.gated_norm import GatedNorm
from penstock.kernels.triton.device import next_power_of_two


@triton.jit
def gated_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, stride_x, stride_g, stride_o, group_size, weight_step, eps,
    NORM: tl.constexpr, NORMS_FIRST: tl.constexpr, SIGMOID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (T, groups)."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < group_size
    at = group * group_size + cols
    y = tl.load(x_ptr + row * stride_x + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_g + at, mask=mask, other=0.0).to(tl.float32)
    opening = tl.sigmoid(gate)
    if not SIGMOID:
        opening *= gate
    if not NORMS_FIRST:
        y *= opening
    if NORM:
        y *= 1.0 / tl.sqrt(tl.sum(y * y, 0) / group_size + eps)
        y *= tl.load(weight_ptr + group * weight_step + cols, mask=mask, other=0.0).to(tl.float32)
    if NORMS_FIRST:
        y *= opening
    tl.store(out_ptr + row * stride_o + at, y.to(out_ptr.dtype.element_ty), mask=mask)


def gated_norm_triton(x: Tensor, gate: Tensor, weights: GatedNorm) -> Tensor:
    """Arguments and result as in `gated_norm`."""
    num_tokens, width = x.shape
    out = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    weight, eps, group_size, norms_first, is_sigmoid = weights
    group_size = group_size or width
    block = next_power_of_two(group_size)
    gated_norm_kernel[(num_tokens, width // group_size)](
        *(x, gate, x if weight is None else weight, out, x.stride(0), gate.stride(0), out.stride(0), group_size),
        *(group_size if weight is not None and len(weight) == width else 0, eps),
        NORM=weight is not None,
        NORMS_FIRST=norms_first,
        SIGMOID=is_sigmoid,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out
