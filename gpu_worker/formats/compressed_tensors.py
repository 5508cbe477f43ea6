"""The format of compressed-tensors: w[n, k] = scales[n, j] * (codes[n, k] - zeros[n, j]).

Integers are signed. Packed integers have 2**(bits - 1) added, and form a stream of bits in 32-bit words along the
inputs. Their zero points are packed in the same way, but along the outputs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.gpu_worker.formats.fp8 import fp8_weight, input_rounding
from penstock.gpu_worker.formats.packing import equal_or_all, order_of_groups, packed, unpacked
from penstock.kernels.quantized.weight import QuantizedWeight
from penstock.models.files.source import LoadError
from penstock.models.formats.compressed_tensors import Floats, Integers, Matrix, Packed, Scales


def decode_packed(format: Packed, parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """As `Decode`."""
    words, bits = parts["codes"], format.bits
    num_outputs, num_inputs = len(words), words.shape[1] * 32 // bits
    if "shape" in parts:
        num_inputs = int(parts["shape"][1])
    if not num_inputs or -(-num_inputs * bits // 32) != words.shape[1]:
        raise LoadError(f"the weights are damaged: weight_shape has {num_inputs} inputs, weight_packed has others")
    codes = unpacked(words, bits, num_inputs)
    zeros: Tensor | int = 2 ** (bits - 1)
    if "zeros" in parts:
        stored = unpacked(parts["zeros"].t(), bits, len(parts["scales"])).t()
        zeros = equal_or_all(_for_outputs(stored, format.scales, num_outputs))
    group = format.scales.columns or num_inputs
    order = order_of_groups(parts["groups"], group) if "groups" in parts else None
    return QuantizedWeight(
        codes=codes if order is None else codes[:, order],
        bits=bits,
        group=group,
        scales=_for_outputs(parts["scales"], format.scales, num_outputs),
        zeros=zeros,
        order=order,
        inputs=input_rounding(format.inputs, parts.get("input_scale")),
    )


def decode_integers(format: Integers, parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """As `Decode`."""
    codes, middle = parts["codes"], 2 ** (format.bits - 1)
    zeros: Tensor | int = middle
    if "zeros" in parts:
        zeros = equal_or_all(_for_outputs(_unsigned(parts["zeros"], middle), format.scales, len(codes)))
    return QuantizedWeight(
        codes=_unsigned(codes, middle),
        bits=format.bits,
        group=format.scales.columns or codes.shape[1],
        scales=_for_outputs(parts["scales"], format.scales, len(codes)),
        zeros=zeros,
        inputs=input_rounding(format.inputs, parts.get("input_scale")),
    )


def decode_floats(format: Floats, parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """As `Decode`."""
    rows, columns = format.scales
    codes, rounding = parts["codes"], input_rounding(format.inputs, parts.get("input_scale"))
    block = None if rows is None or columns is None else (rows, columns)
    return fp8_weight(codes, parts["scales"], block, rounding)


def encode(format: Matrix, weight: QuantizedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors to store for a matrix, by their roles in `MatrixFormat.parts`: the inverse of the functions above.

    Args:
        format: integers of 4 or 8 bits, or FP8; with scales for groups of inputs, or for outputs.
        weight: a matrix that the format can hold.
        dtype: of scales; it must hold the weight's scales exactly.
    """
    parts = {"scales": weight.scales.to(dtype)}
    if isinstance(format, Floats):
        return parts | {"codes": weight.codes.view(torch.float8_e4m3fn)}
    middle = 2 ** (format.bits - 1)
    if isinstance(format, Integers):
        return parts | {"codes": (weight.codes - middle).view(torch.int8)}
    parts |= {"codes": packed(weight.codes, format.bits), "shape": torch.tensor(weight.codes.shape)}
    if not format.is_symmetric:
        zeros = weight.zeros
        its = zeros if isinstance(zeros, Tensor) else torch.full(weight.scales.shape, zeros, dtype=torch.uint8)
        parts["zeros"] = packed(its.t(), format.bits).t().contiguous()
    return parts


def _unsigned(codes: Tensor, middle: int) -> Tensor:
    """uint8 of int8, with `middle` added."""
    return codes.view(torch.uint8) + middle


def _for_outputs(its: Tensor, scales: Scales, num_outputs: int) -> Tensor:
    """[N, J], from one number for each block, or one for the matrix."""
    if scales.rows is None:
        return its.reshape(1, 1).expand(num_outputs, 1).contiguous()
    return its.repeat_interleave(scales.rows, dim=0)[:num_outputs].contiguous()
