"""What products with quantized matrices have to be."""

import os
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.quantized.inputs import RoundedInputs, as_floats, round_inputs_reference
from penstock.kernels.quantized.weight import QuantizedWeight, dequantized

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""The relative error of rounding to nearest."""

CUT = 2.0**-11 if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else 0.0
"""What products of FP8 may cost, relative to the sum of magnitudes: GPUs add 32 of them to the sum so far with 13 bits
below the largest, and cut off the rest. Of 512 random products an H100 has lost 2**-12.7."""


def inputs_of(x: Tensor, weight: QuantizedWeight) -> Tensor | RoundedInputs:
    """As a product gets them."""
    if weight.order is not None:
        x = x[:, weight.order]
    return x if weight.inputs is None else round_inputs_reference(x, weight.inputs)


def on(device: str, its: Any) -> Any:
    """A tensor, rounded inputs, or nothing, there."""
    if isinstance(its, RoundedInputs):
        return its._replace(codes=its.codes.to(device), scales=its.scales.to(device))
    return None if its is None else its.to(device)


def x_of(inputs: Tensor | RoundedInputs, rows: Tensor) -> Tensor | RoundedInputs:
    """Some tokens' inputs."""
    if isinstance(inputs, Tensor):
        return inputs[rows]
    scales = inputs.scales if len(inputs.scales) == 1 else inputs.scales[rows]
    return inputs._replace(codes=inputs.codes[rows], scales=scales)


def assert_is_product(
    got: Tensor,
    x: Tensor | RoundedInputs,
    weight: QuantizedWeight,
    bias: Tensor | None,
    row_scales: Tensor | None = None,
) -> None:
    """Within what rounding allows: of each weight to the dtype, of sums in fp32, of the result."""
    is_fp8 = isinstance(x, RoundedInputs) and x.codes.dtype == torch.float8_e4m3fn
    matrix = dequantized(weight._replace(order=None)).double()
    x = x.double() if isinstance(x, Tensor) else as_floats(x).double()
    x = x if row_scales is None else x * row_scales.double().view(-1, 1)
    expected, size = x @ matrix.T, x.abs() @ matrix.abs().T
    expected = expected if bias is None else expected + bias.double()
    num_inputs = matrix.shape[1]
    cut = CUT if is_fp8 else 0.0
    bound = (UNIT[got.dtype] + cut + 2 * num_inputs * 2.0**-24) * size + UNIT[got.dtype] * expected.abs() * 1.01 + 1e-7
    assert got.shape == expected.shape
    assert bool(((got.double() - expected).abs() <= bound).all())
