"""Inputs of a product, rounded to 8 bits as the checkpoint of its weights specifies.

int8: scale = amax / 127, code = x / scale, rounded half to even. FP8: scale = amax / 448, code = E4M3 of x / scale.
Here amax is the largest magnitude of a token, or of each group of its inputs. A static scale comes from the checkpoint,
and larger inputs are clamped. If an input is NaN, the scale and all results of its token become NaN. With a static
scale, an int8 code of NaN is 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.activation import Activation
from penstock.kernels.quantized.weight import InputRounding

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0}


class RoundedInputs(NamedTuple):
    """[T, K] with 8 bits each: x = code * scale of its group of inputs."""

    codes: Tensor  # int8[T, K], or float8_e4m3fn
    scales: Tensor  # fp32[T, G]; [1, 1] if static
    group: int  # inputs that share a scale; at least K if all do


def round_inputs(x: Tensor, rounding: InputRounding, activation: Activation | None = None) -> RoundedInputs:
    """Round floats [T, K]; with an activation, round activation(x), which is first rounded to the dtype of `x`."""
    if x.ndim != 2:
        raise ValueError(f"x must be [T, K], got {tuple(x.shape)}")
    if x.is_cuda:
        from penstock.kernels.triton.quantized.inputs import round_inputs_triton

        return round_inputs_triton(x, rounding, activation)
    return round_inputs_reference(x if activation is None else activation(x), rounding)


def round_inputs_reference(x: Tensor, rounding: InputRounding) -> RoundedInputs:
    """The formula, in fp32."""
    largest = LARGEST[rounding.dtype]
    num_inputs = x.shape[1]
    group = rounding.group or num_inputs
    x32 = x.float()
    if rounding.scale is not None:
        scales = rounding.scale.float().reshape(1, 1)
        scaled = x32 / scales
        group = num_inputs
    else:
        padded = torch.nn.functional.pad(x32, (0, -num_inputs % group)).unflatten(1, (-1, group))
        scales = padded.abs().amax(-1) / largest
        # If all inputs are zero, their codes are zero as well.
        scaled = (padded / torch.where(scales == 0, 1.0, scales).unsqueeze(-1)).flatten(1)[:, :num_inputs]
    if rounding.dtype == "int8":
        return RoundedInputs(scaled.nan_to_num(0.0).round().clamp(-128, 127).to(torch.int8), scales, group)
    return RoundedInputs(scaled.clamp(-largest, largest).to(torch.float8_e4m3fn), scales, group)


def as_floats(inputs: RoundedInputs) -> Tensor:
    """fp32[T, K], the values of the rounded numbers."""
    num_inputs = inputs.codes.shape[1]
    return inputs.codes.float() * inputs.scales.repeat_interleave(inputs.group, dim=1)[:, :num_inputs]
