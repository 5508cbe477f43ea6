"""From a float matrix to a quantized one: see `Recipe` for the formats."""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.gpu_worker.formats.fp8 import fp8_weight
from penstock.gpu_worker.formats.group_rounding import INT4_BITS, Correlation, rounded_in_groups
from penstock.kernels.quantized.weight import InputRounding, QuantizedWeight
from penstock.models.formats.made import Recipe

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INT8_ZERO = 128
_LARGEST_INT8 = 127
_LARGEST_E4M3 = 448.0
_AT_ONCE = 1 << 20
"""Weights that are rounded together, so that intermediate results stay in the processor's cache."""


def made(
    matrix: Tensor,
    recipe: Recipe,
    correlation: Correlation | None = None,
    of_whole: Callable[[Tensor], Tensor] = lambda largest: largest,
) -> QuantizedWeight:
    """Quantize one matrix. Scales have the matrix's dtype, as a checkpoint of that dtype would store them.

    Args:
        matrix: [N, K], for experts [E, N, K]; floats. Dtypes other than fp32, bf16 and fp16 become fp32.
        recipe: the format.
        correlation: of the matrix's inputs, if they were measured. Then `int4` keeps products near their old values,
            and not only weights.
        of_whole: turns each output's largest magnitude over these inputs, [N, 1], into that over all inputs, for a
            matrix whose inputs are in several parts. `int4` does not call it.
    """
    if matrix.dtype not in _DTYPES:
        matrix = matrix.float()
    if recipe.format == "int4":
        codes, scales, zeros = rounded_in_groups(matrix, recipe.group, recipe.has_zeros, correlation)
        return QuantizedWeight(codes, INT4_BITS, recipe.group, scales, zeros)
    is_fp8, num_inputs = recipe.format == "fp8", matrix.shape[-1]
    by_output = matrix.reshape(-1, num_inputs)
    scales = _scales(by_output, _LARGEST_E4M3 if is_fp8 else _LARGEST_INT8, of_whole)
    codes = torch.empty(by_output.shape, dtype=torch.float8_e4m3fn if is_fp8 else torch.uint8, device=matrix.device)
    num_rows = max(1, _AT_ONCE // num_inputs)
    for part, its_scales, into in zip(*(its.split(num_rows) for its in (by_output, scales, codes)), strict=True):
        scaled = part.float() / its_scales.float()
        into.copy_(scaled.clamp_(-_LARGEST_E4M3, _LARGEST_E4M3) if is_fp8 else _int8(scaled))
    codes, scales = codes.view(matrix.shape), scales.view(*matrix.shape[:-1], 1)
    if is_fp8:
        return fp8_weight(codes, scales, None, InputRounding("fp8_e4m3"))
    inputs = InputRounding("int8") if recipe.format == "int8" else None
    return QuantizedWeight(codes, 8, num_inputs, scales, _INT8_ZERO, inputs=inputs)


def _scales(by_output: Tensor, largest: float, of_whole: Callable[[Tensor], Tensor]) -> Tensor:
    """[N, 1]: the largest magnitude gets the largest code; an output of zeros gets scale 1."""
    low, high = by_output.aminmax(dim=-1, keepdim=True)
    scales = (of_whole(torch.maximum(-low, high)).float() / largest).to(by_output.dtype)
    return scales.masked_fill_(scales == 0, 1.0)


def _int8(scaled: Tensor) -> Tensor:
    return scaled.round_().clamp_(-_LARGEST_INT8, _LARGEST_INT8).add_(_INT8_ZERO)
