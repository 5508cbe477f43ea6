"""Inputs of products, rounded to 8 bits with a scale for each token or group."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.activation import Activation
from penstock.kernels.quantized.inputs import LARGEST, RoundedInputs
from penstock.kernels.quantized.weight import InputRounding
from penstock.kernels.triton.activation import activated, gated
from penstock.kernels.triton.device import ceil_div, next_power_of_two
from penstock.kernels.triton.sampling.sampling import larger_or_nan


@triton.jit
def as_int8(x):
    """Rounded half to even: adding 1.5 * 2**23 leaves no room for a fraction. NaN becomes 0."""
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -128.0), 127.0), 0.0)
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def as_e4m3(x):
    """uint8: the bits of E4M3, rounded half to even and clamped to 448. It works on GPUs with and without E4M3."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    is_nan = size > 0x7F800000
    size = tl.minimum(size, 0x43E00000)  # of 448
    # From 2**-6 on: three bits of mantissa, and a different bias. Below: multiples of 2**-9, the last bit of 2**14.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(is_nan, 127, tl.where(size < 0x3C800000, small, normal))
    return (code | ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def round_inputs_kernel(
    x_ptr, static_ptr, codes_ptr, scales_ptr, num_inputs, num_groups, group, stride_x,
    KIND: tl.constexpr, GATED: tl.constexpr, MOST: tl.constexpr, IS_STATIC: tl.constexpr, IS_INT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (T, G): a group of a token's inputs. KIND: of the activation that is applied first; "" for none."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    cols = tl.program_id(1) * group + offs
    mask = (offs < group) & (cols < num_inputs)
    x = tl.load(x_ptr + token * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    if KIND != "":
        if GATED:
            up = tl.load(x_ptr + token * stride_x + num_inputs + cols, mask=mask, other=0.0).to(tl.float32)
            x = gated(x, up, KIND)
        else:
            x = activated(x, KIND)
        # Rounded as if it were stored.
        x = tl.where(mask, x, 0.0).to(x_ptr.dtype.element_ty).to(tl.float32)
    if IS_STATIC:
        scale = tl.load(static_ptr)
        divisor = scale
    else:
        scale = tl.div_rn(tl.reduce(tl.abs(x), 0, larger_or_nan), MOST)
        divisor = tl.where(scale == 0.0, 1.0, scale)
        tl.store(scales_ptr + token * num_groups + tl.program_id(1), scale)
    scaled = tl.div_rn(x, divisor)
    codes = as_int8(scaled) if IS_INT else as_e4m3(scaled)
    tl.store(codes_ptr + token * num_inputs + cols, codes, mask=mask)


def round_inputs_triton(x: Tensor, rounding: InputRounding, activation: Activation | None = None) -> RoundedInputs:
    """Arguments as `penstock.kernels.quantized.inputs.round_inputs`."""
    num_tokens, num_inputs = x.shape
    is_gated = activation is not None and activation.is_gated
    num_inputs //= 2 if is_gated else 1
    is_int, is_static = rounding.dtype == "int8", rounding.scale is not None
    # With a static scale, inputs do not depend on each other.
    group = min(num_inputs, 4096) if is_static else rounding.group or num_inputs
    num_groups = ceil_div(num_inputs, group)
    codes = torch.empty((num_tokens, num_inputs), dtype=torch.int8 if is_int else torch.uint8, device=x.device)
    scales = x.new_empty((num_tokens, num_groups), dtype=torch.float32) if rounding.scale is None else rounding.scale
    if num_tokens:
        block = next_power_of_two(group)
        x = x if x.stride(1) == 1 else x.contiguous()
        round_inputs_kernel[(num_tokens, num_groups)](
            x, scales, codes, scales, num_inputs, num_groups, group, x.stride(0),
            KIND="" if activation is None else activation.kind, GATED=is_gated, MOST=LARGEST[rounding.dtype],
            IS_STATIC=is_static, IS_INT=is_int, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    codes = codes if is_int else codes.view(torch.float8_e4m3fn)
    return RoundedInputs(codes, scales.view(1, 1) if is_static else scales, num_inputs if is_static else group)
