"""Norms, alone and fused with the addition to the residual stream."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.norms import NormWeights
from penstock.kernels.triton.device import next_power_of_two


@triton.jit
def normed(
    x, cols, mask, weight_ptr, bias_ptr, width, eps, KIND: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr
):
    """The norm of one vector, in its dtype. Masked elements must be 0."""
    if WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    x32 = x.to(tl.float32)
    if KIND == "layer":
        x32 = tl.where(mask, x32 - tl.sum(x32, 0) / width, 0.0)
    y = x32 * (1.0 / tl.sqrt(tl.sum(x32 * x32, 0) / width + eps))
    if WEIGHT:
        if KIND == "rms":
            y = y.to(weight.dtype)
        y = y * weight
    if BIAS:
        y += bias
    return y.to(x.dtype)


@triton.jit
def norm_kernel(
    x_ptr,
    residual_ptr,
    post_weight_ptr,
    post_bias_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    width,
    stride_x,
    stride_r,
    stride_o,
    scale,
    post_eps,
    eps,
    ADD: tl.constexpr,
    POST: tl.constexpr,
    POST_WEIGHT: tl.constexpr,
    POST_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T,): one program per vector. ADD: residual += scale * x first, and the sum is normed.

    POST is the kind of the norm that is applied to x before it is added, NORM the kind for the sum; "" for none.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * stride_r + cols, mask=mask, other=0.0)
        if POST != "":
            x = normed(x, cols, mask, post_weight_ptr, post_bias_ptr, width, post_eps, POST, POST_WEIGHT, POST_BIAS)
        # The sum is rounded to the stream's dtype before it is normed, as the unfused layers do.
        x = (x.to(tl.float32) * scale + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * stride_r + cols, x, mask=mask)
    if NORM != "":
        y = normed(x, cols, mask, weight_ptr, bias_ptr, width, eps, NORM, WEIGHT, BIAS)
        tl.store(out_ptr + row * stride_o + cols, y.to(out_ptr.dtype.element_ty), mask=mask)


def norm_triton(x: Tensor, weights: NormWeights) -> Tensor:
    """[..., H] -> [..., H], contiguous."""
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(flat)
    _launch(flat, None, out, weights, 1.0, None)
    return out.view(x.shape)


def add_norm_triton(
    x: Tensor, residual: Tensor, weights: NormWeights | None, scale: float = 1.0, post: NormWeights | None = None
) -> tuple[Tensor, Tensor]:
    """x, residual [T, H] -> (normed, residual updated in place)."""
    out = residual if weights is None else torch.empty_like(x)
    _launch(x, residual, out, weights, scale, post)
    return out, residual


def _launch(
    x: Tensor,
    residual: Tensor | None,
    out: Tensor,
    weights: NormWeights | None,
    scale: float,
    post: NormWeights | None,
) -> None:
    num_vectors, width = x.shape
    if not num_vectors:
        return
    block = next_power_of_two(width)
    num_warps = min(16, max(1, block // 512))  # 16 elements a thread: two 16-byte loads in flight at 2 bytes each
    stream = x if residual is None else residual
    weight, eps, kind, bias = weights or NormWeights()
    post_weight, post_eps, post_kind, post_bias = post or NormWeights()
    norm_kernel[(num_vectors,)](
        x,
        stream,
        x if post_weight is None else post_weight,
        x if post_bias is None else post_bias,
        x if weight is None else weight,
        x if bias is None else bias,
        out,
        width,
        x.stride(0),
        stream.stride(0),
        out.stride(0),
        scale,
        post_eps,
        eps,
        ADD=residual is not None,
        POST=post_kind if post else "",
        POST_WEIGHT=post_weight is not None,
        POST_BIAS=post_bias is not None,
        NORM=kind if weights else "",
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        BLOCK=block,
        num_warps=num_warps,
    )
