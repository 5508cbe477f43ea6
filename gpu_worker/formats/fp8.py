"""FP8 checkpoints: w[n, k] = codes[n, k] * scales[n // rows, k // columns], for blocks of rows x columns."""

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.kernels.quantized.weight import InputRounding, QuantizedWeight
from penstock.models.formats.format import Inputs
from penstock.models.formats.fp8 import FP8Matrix

_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The value of each byte; two bytes are NaN."""
_EXPONENT_BIAS = 127  # of scales that are powers of two


def decode(format: FP8Matrix, parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """As `Decode`."""
    codes, scales = parts["codes"], parts["scales"]
    if scales.dtype == torch.uint8:
        scales = torch.exp2(scales.float() - _EXPONENT_BIAS)
    return fp8_weight(codes, scales, format.block, input_rounding(format.inputs, parts.get("input_scale")))


def fp8_weight(
    codes: Tensor, scales: Tensor, block: tuple[int, int] | None, inputs: InputRounding | None
) -> QuantizedWeight:
    """An FP8 format.

    Args:
        codes: float8_e4m3fn[..., N, K].
        scales: [..., ceil(N / rows), ceil(K / columns)], or one number, or one for each output.
        block: rows and columns; None if a scale is for all inputs.
        inputs: as in `QuantizedWeight`.
    """
    *experts, num_outputs, num_inputs = codes.shape
    if block is None:
        of_outputs = scales.float().reshape(*experts, -1, 1).expand(*experts, num_outputs, 1)
    else:
        of_outputs = scales.float().repeat_interleave(block[0], dim=-2)[..., :num_outputs, :]
    return QuantizedWeight(
        codes=codes.view(torch.uint8),
        bits=8,
        group=num_inputs if block is None else block[1],
        scales=of_outputs.contiguous(),
        values=_VALUES,
        inputs=inputs,
    )


def input_rounding(inputs: Inputs | None, scale: Tensor | None) -> InputRounding | None:
    """How inputs are rounded; with the checkpoint's scale if there is one."""
    if inputs is None:
        return None
    return InputRounding(inputs.dtype, None if scale is None else scale.float().reshape(()), inputs.group)
