"""What products with quantized matrices have to be."""

from typing import Any

import torch
from torch import Tensor

from penstock.kernels.quantized.inputs import RoundedInputs, as_floats, round_inputs_reference
from penstock.kernels.quantized.weight import QuantizedWeight, dequantized

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""The relative error of rounding to nearest."""


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
    matrix = dequantized(weight._replace(order=None)).double()
    x = x.double() if isinstance(x, Tensor) else as_floats(x).double()
    x = x if row_scales is None else x * row_scales.double().view(-1, 1)
    expected, size = x @ matrix.T, x.abs() @ matrix.abs().T
    expected = expected if bias is None else expected + bias.double()
    num_inputs = matrix.shape[1]
    bound = (UNIT[got.dtype] + 2 * num_inputs * 2.0**-24) * size + UNIT[got.dtype] * expected.abs() * 1.01 + 1e-7
    assert got.shape == expected.shape
    assert bool(((got.double() - expected).abs() <= bound).all())
