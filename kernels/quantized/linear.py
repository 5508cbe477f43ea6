"""Products with quantized matrices that stay packed: plain products, experts' products, and rows of embeddings.

If the weights require it, inputs are rounded first (`inputs.py`). Integers of 8 bits with one scale for each output are
then multiplied as integers, exactly. All other products are of floats in the dtype of x.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.activation import Activation
from penstock.kernels.experts.experts import BlockedRows, GroupedRows, num_inputs
from penstock.kernels.quantized.device_weight import (
    DeviceWeight,
    pack_experts_for_device,
    pack_for_device,
    unpacked,
)
from penstock.kernels.quantized.inputs import RoundedInputs, as_floats, round_inputs
from penstock.kernels.quantized.weight import dequantized

__all__ = [
    "DeviceWeight",
    "grouped_quantized_linear",
    "pack_experts_for_device",
    "pack_for_device",
    "quantized_linear",
    "rows",
]

_UNPACKED_AT_A_TIME = 1 << 22
"""How many numbers are unpacked at a time: 16 MiB in fp32, and as much again for each intermediate tensor."""
_EXACT_IN_FP32 = 1024
"""This many products of two signed bytes always have a sum below 2**24."""


def quantized_linear(
    x: Tensor, weight: DeviceWeight, bias: Tensor | None = None, *, activation: Activation | None = None
) -> Tensor:
    """x @ weight^T + bias.

    Args:
        x: [T, K], fp32, fp16 or bf16; with an activation, the activation's input.
        weight: [N, K], from `pack_for_device`, on the device of `x`.
        bias: [N] or None.
        activation: applied to `x` first; None for none.

    Returns:
        [T, N] in the dtype of `x`. Sums are fp32 or integers.
    """
    inputs = _inputs_of(x, weight, 2, activation)
    if x.is_cuda:
        from penstock.kernels.triton.quantized.linear import quantized_linear_triton

        return quantized_linear_triton(inputs, weight, bias, x.dtype)
    return _product(inputs, weight, bias, x.dtype)


def grouped_quantized_linear(
    x: Tensor,
    grouped: GroupedRows,
    weight: DeviceWeight,
    bias: Tensor | None = None,
    *,
    of_tokens: bool = False,
    scales: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """Each row's product with its expert's matrix, as `penstock.kernels.experts.experts.grouped_linear`.

    Args:
        x: [R, K], an earlier result; or, if `of_tokens`, [T, K] with one input for all rows of a token. With an
            activation, the activation's input.
        grouped: the rows.
        weight: [E, N, K], from `pack_for_device`.
        bias: [E, N] or None.
        of_tokens: see `x`.
        scales: fp32 [T, k], factors of the inputs after they are rounded; None for none.
        activation: applied to `x` first; None for none.

    Returns:
        [R, N] in the dtype of `x`, in the order in which `grouped` stores rows.
    """
    num_rows = num_inputs(grouped, of_tokens=of_tokens)
    if x.shape[0] != num_rows:
        raise ValueError(f"x {tuple(x.shape)} does not fit {num_rows} rows")
    inputs = _inputs_of(x, weight, 3, activation)
    if isinstance(grouped, BlockedRows):
        from penstock.kernels.triton.quantized.linear import grouped_quantized_linear_triton

        return grouped_quantized_linear_triton(
            inputs, grouped, weight, bias, x.dtype, of_tokens=of_tokens, scales=scales
        )
    if of_tokens:
        inputs = _rows_of(inputs, grouped.rows // grouped.top_k)
    if scales is not None:
        inputs = _times(inputs, scales.flatten()[grouped.rows, None])
    out = x.new_empty(grouped.rows.shape[0], weight.num_outputs)
    for expert, begin, end in grouped.experts:
        its_bias = None if bias is None else bias[expert]
        out[begin:end] = _product(_rows_of(inputs, slice(begin, end)), weight, its_bias, x.dtype, expert)
    return out


def rows(weight: DeviceWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the matrix: embeddings.

    Args:
        weight: [V, H].
        ids: int[T], each in [0, V).
        dtype: of the result.

    Returns:
        [T, H].
    """
    if ids.is_cuda:
        from penstock.kernels.triton.quantized.rows import quantized_rows_triton

        return quantized_rows_triton(weight, ids, dtype)
    return dequantized(unpacked(weight, ids.long())).to(dtype)


def _inputs_of(x: Tensor, weight: DeviceWeight, ndim: int, activation: Activation | None) -> Tensor | RoundedInputs:
    """The inputs activated, put into the weight's order and rounded; in one launch if there is no order."""
    shape = weight.planes[0].shape
    width = weight.num_inputs * (2 if activation is not None and activation.is_gated else 1)
    if x.ndim != 2 or x.shape[1] != width or len(shape) != ndim:
        raise ValueError(f"x {tuple(x.shape)} does not fit {(*shape[:-1], weight.num_inputs)}")
    if weight.inputs is not None and weight.order is None:
        return round_inputs(x, weight.inputs, activation)
    if activation is not None:
        x = activation(x)
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    return x if weight.inputs is None else round_inputs(x, weight.inputs)


def _product(
    inputs: Tensor | RoundedInputs,
    weight: DeviceWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    expert: int | None = None,
) -> Tensor:
    num_rows = (inputs if isinstance(inputs, Tensor) else inputs.codes).shape[0]
    out = torch.empty(num_rows, weight.num_outputs, dtype=dtype, device=weight.device)
    for part in _parts(weight):
        its_bias = None if bias is None else bias[part]
        matrix = unpacked(weight, part, expert)._replace(order=None)
        if isinstance(inputs, RoundedInputs) and is_of_integers(inputs, weight):
            sums = _integer_sums(inputs.codes, (matrix.codes ^ 128).view(torch.int8))
            result = sums * inputs.scales * matrix.scales.float().squeeze(-1)
            out[:, part] = result if its_bias is None else result + its_bias
        elif isinstance(inputs, RoundedInputs):
            its_bias = None if its_bias is None else its_bias.float()
            out[:, part] = functional.linear(as_floats(inputs), dequantized(matrix), its_bias)
        else:
            out[:, part] = functional.linear(inputs, dequantized(matrix).to(dtype), its_bias)
    return out


def is_of_integers(inputs: RoundedInputs, weight: DeviceWeight) -> bool:
    """Whether integers are summed: tokens and outputs have one scale each, and the zero is 128 throughout."""
    is_whole: bool = inputs.codes.dtype == torch.int8 and inputs.scales.shape[1] == 1
    is_signed = weight.planes[0].dtype == torch.int8 and isinstance(weight.zeros, int) and weight.zeros == 0
    return is_whole and is_signed and weight.has_output_scales


def _integer_sums(x: Tensor, weight: Tensor) -> Tensor:
    """int8[T, K] and int8[N, K] -> fp32[T, N]: sums are exact, and rounded once."""
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
    for begin in range(0, x.shape[1], _EXACT_IN_FP32):
        some = slice(begin, begin + _EXACT_IN_FP32)
        total += functional.linear(x[:, some].float(), weight[:, some].float()).int()
    return total.float()


def _parts(weight: DeviceWeight) -> Iterator[slice]:
    """Ranges of outputs that are unpacked together."""
    size = max(1, _UNPACKED_AT_A_TIME // weight.num_inputs)
    for begin in range(0, weight.num_outputs, size):
        yield slice(begin, min(begin + size, weight.num_outputs))


def _rows_of(inputs: Tensor | RoundedInputs, chosen: Tensor | slice) -> Tensor | RoundedInputs:
    if isinstance(inputs, Tensor):
        return inputs[chosen]
    scales = inputs.scales if inputs.scales.shape[0] == 1 else inputs.scales[chosen]
    return inputs._replace(codes=inputs.codes[chosen], scales=scales)


def _times(inputs: Tensor | RoundedInputs, scales: Tensor) -> Tensor | RoundedInputs:
    if isinstance(inputs, Tensor):
        return inputs * scales.to(inputs.dtype)
    return inputs._replace(scales=inputs.scales * scales)
