"""RMSNorm, alone and fused with the residual addition."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import next_power_of_two


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    width,
    stride_x,
    stride_r,
    stride_o,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T,): one program per vector. ADD: residual += x first, and the sum is normed."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * stride_r + cols, mask=mask, other=0.0)
        # The sum is rounded to the stream's dtype before it is normed, as the unfused layers do.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * stride_r + cols, x, mask=mask)
    x32 = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x32 * x32, 0) / width + eps)
    normed = (x32 * scale).to(x.dtype)
    tl.store(out_ptr + row * stride_o + cols, (normed * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., H] -> [..., H], contiguous."""
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(flat)
    _launch(flat, flat, weight, out, eps, add=False)
    return out.view(x.shape)


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [T, H] -> (normed, residual updated in place)."""
    out = torch.empty_like(x)
    _launch(x, residual, weight, out, eps, add=True)
    return out, residual


def _launch(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, *, add: bool) -> None:
    num_vectors, width = x.shape
    if not num_vectors:
        return
    block = next_power_of_two(width)
    num_warps = min(16, max(1, block // 512))  # 16 elements a thread: two 16-byte loads in flight at 2 bytes each
    rms_norm_kernel[(num_vectors,)](
        x, residual, weight, out, width, x.stride(0), residual.stride(0), out.stride(0), eps,
        ADD=add, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip
