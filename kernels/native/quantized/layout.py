"""Chooses the layout (`layout.h`) of a quantized weight, and converts its numbers to the types of the layout."""

import ctypes
import math
from ctypes import c_float, c_int32, c_uint8, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.quantized.weight import SUPER_GROUP, InputRounding, QuantizedWeight

_MOST_BLOCK, _PADDING = 256, 32  # most inputs in a block, and the multiple to which they are padded (layout.h)
_MIN_GROUP = 16  # inputs that share a scale
INPUT_BLOCK_FLOATS = 112  # room for a token's rounded inputs to a block (layout.h)
_ROUNDED_TOGETHER = 32  # inputs of a token that share a scale if the format does not say how to round them
_MOST_INPUTS = 1 << 16  # sums of more products of 8-bit integers may not fit into 32 bits
_TYPES = {
    torch.float16: "half",
    torch.bfloat16: "bf16",
    torch.float32: "float",
    torch.uint8: "byte",
    torch.int8: "signed byte",
}
SCALE_TYPES = (None, *_TYPES.values())  # as enum ScaleType in layout.h


class QuantizedStruct(ctypes.Structure):
    """As Quantized in layout.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("output_scales", "order", "values", "pair_bytes")),
        ("input_scale", c_float),
        *((name, c_int32) for name in ("input_group", "bits", "group", "block", "zero", "scale_type")),
        *((name, c_int32) for name in ("has_super", "has_zeros", "has_minimums", "has_table")),
        *((name, c_int32) for name in ("values_are_e4m3", "rounds_to_e4m3")),
        ("table", c_uint8 * 16),
    )


class SourceStruct(ctypes.Structure):
    """As QuantizedSource in pack.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scales", "minimums", "zeros", "super_scales", "super_minimums")),
        *((name, c_int32) for name in ("num_outputs", "num_inputs", "num_groups", "num_supers")),
    )


class QuantizedSource(NamedTuple):
    """A matrix with numbers in the types of its layout. Rows of all tensors are outputs."""

    struct: QuantizedStruct  # without `output_scales`
    codes: Tensor  # uint8[N, K]
    scales: Tensor  # [N, J]; or, with output scales, fp32[N, 1]
    minimums: Tensor | None
    zeros: Tensor | None  # uint8
    super_scales: Tensor | None
    super_minimums: Tensor | None
    order: Tensor | None  # int32[K]
    values: Tensor | None  # fp32[2**bits], if they are not integers
    pair_bytes: Tensor | None  # uint8[2, 128], the values as bf16: lower bytes, upper bytes

    @property
    def has_output_scales(self) -> bool:
        """Whether each output has one scale, stored apart from the blocks."""
        return SCALE_TYPES[self.struct.scale_type] is None

    def pointers(self) -> SourceStruct:
        """Points into this object, which must outlive it."""
        scales = None if self.has_output_scales else self.scales
        parts = (self.codes, scales, self.minimums, self.zeros, self.super_scales, self.super_minimums)
        num_supers = 0 if self.super_scales is None else self.super_scales.shape[1]
        addresses = (None if part is None else part.data_ptr() for part in parts)
        return SourceStruct(*addresses, *self.codes.shape, self.scales.shape[1], num_supers)


class Quantization(NamedTuple):
    """What a packed weight has besides its blocks. `struct` points to the tensors."""

    struct: QuantizedStruct
    output_scales: Tensor | None  # fp32, padded like the weight
    order: Tensor | None  # int32[K]
    values: tuple[Tensor | None, ...] = ()


class UnsupportedWeightError(ValueError):
    """No kernel multiplies such a weight; the message says why in one sentence."""


def kind_of_product(weight: QuantizedWeight, *, rounds_inputs: bool, multiplies_bf16: bool) -> str:
    """One of the quantized WEIGHT_KINDS of library.py.

    Args:
        weight: the weight.
        rounds_inputs: whether inputs may be rounded: to int8 for integers, to bf16 for values that are not integers.
        multiplies_bf16: whether the processor multiplies pairs of bf16.
    """
    has_whole_values = _with_whole_values(weight) is not None
    rounds_as_wanted = weight.inputs is not None and weight.inputs.dtype == "int8"
    if rounds_as_wanted or (rounds_inputs and weight.inputs is None and has_whole_values):
        return "quantized_int8"
    takes_pairs = rounds_inputs and multiplies_bf16 and _has_bf16_values(weight) and not has_whole_values
    return "quantized_bf16" if takes_pairs else "quantized_fp32"


def prepared(weight: QuantizedWeight, kind: str = "quantized_int8") -> QuantizedSource:
    """Choose the layout of a weight for one kind of product, and convert the weight to the layout's types.

    Raises:
        UnsupportedWeightError: if no layout can hold the weight.
    """
    num_inputs, group = weight.num_inputs, min(weight.group, weight.num_inputs)
    block = _block_of(group, num_inputs)
    if block < _PADDING:
        raise UnsupportedWeightError(
            f"groups of {group} inputs: the CPU kernels need a multiple of 32, or of 16 up to 112"
        )
    if weight.super_scales is not None and (group < num_inputs and SUPER_GROUP % group):
        raise UnsupportedWeightError(f"groups of {group} inputs do not divide the {SUPER_GROUP} of a super-scale")
    if kind == "quantized_int8" and num_inputs > _MOST_INPUTS:
        raise UnsupportedWeightError(f"{num_inputs} inputs: the CPU kernels multiply at most {_MOST_INPUTS} integers")
    weight, table = _with_whole_values(weight) or (weight, None)
    values = weight.values
    if kind == "quantized_int8" and values is not None:
        raise UnsupportedWeightError("the CPU kernels multiply integers with tables of at most 16 whole numbers only")
    weight = _without_both_corrections(weight)
    zero, zeros = (0, weight.zeros) if isinstance(weight.zeros, Tensor) else (weight.zeros, None)
    of_outputs = group == num_inputs and weight.super_scales is None and zeros is None and weight.minimums is None
    scales, minimums = (weight.scales.float(), None) if of_outputs else _of_one_type(weight)
    rounding = weight.inputs
    rounded_to = "int8" if kind == "quantized_int8" else "fp8_e4m3"
    if rounding is not None and (rounding.dtype != rounded_to or (rounding.group or _PADDING) % _PADDING):
        raise UnsupportedWeightError(f"inputs rounded as {rounding} are not among what the CPU kernels compute with")
    struct = QuantizedStruct(
        order=None,
        input_scale=rounding.scale.item() if rounding is not None and rounding.scale is not None else 0.0,
        input_group=_input_group(rounding, num_inputs, kind),
        bits=weight.bits,
        group=round_up(group, _PADDING) if group == num_inputs else group,
        block=block,
        zero=zero,
        scale_type=SCALE_TYPES.index(None if of_outputs else _TYPES[scales.dtype]),
        has_super=weight.super_scales is not None,
        has_zeros=zeros is not None,
        has_minimums=minimums is not None,
        has_table=table is not None,
        values_are_e4m3=values is not None and _are_e4m3(values),
        rounds_to_e4m3=rounding is not None and rounding.dtype == "fp8_e4m3",
    )
    if table is not None:
        struct.table[: len(table)] = table
    parts = (minimums, zeros, weight.super_scales, weight.super_minimums)
    minimums, zeros, *supers = (part if part is None else part.contiguous() for part in parts)
    order = None if weight.order is None else weight.order.int().contiguous()
    values = None if values is None else values.float().contiguous()
    return QuantizedSource(
        *(struct, weight.codes.contiguous(), scales.contiguous(), minimums, zeros, supers[0], supers[1], order),
        *(values, None if kind != "quantized_bf16" or values is None else _pair_bytes(values)),
    )


def _input_group(rounding: InputRounding | None, num_inputs: int, kind: str) -> int:
    """Inputs of a token that share a scale."""
    if rounding is None and kind == "quantized_int8":
        return _ROUNDED_TOGETHER
    if rounding is None or rounding.scale is not None or rounding.group is None:
        return round_up(num_inputs, _PADDING)
    return rounding.group


def _block_of(group: int, num_inputs: int) -> int:
    """Inputs in a block, which has whole groups or is part of one; below 32 if there is no block for such groups."""
    if group == num_inputs:
        return _MOST_BLOCK
    unit = math.lcm(group, _PADDING)
    if group % _MIN_GROUP:
        return 0
    return _MOST_BLOCK // unit * unit if unit <= _MOST_BLOCK else math.gcd(group, _MOST_BLOCK)


def _with_whole_values(weight: QuantizedWeight) -> tuple[QuantizedWeight, list[int] | None] | None:
    """The same weight with a table of bytes, or None. Values may be doubled, and scales halved, to get integers."""
    if weight.values is None:
        return weight, None
    factor = next((f for f in (1, 2) if torch.equal((weight.values * f).round(), weight.values * f)), None)
    values = weight.values * (factor or 1)
    if factor is None or values.abs().max() > 127 or len(values) > 16 or isinstance(weight.zeros, Tensor):
        return None
    scales, supers = weight.scales, weight.super_scales
    if factor == 2 and weight.super_scales is not None:
        supers = weight.super_scales / 2
        if not torch.equal(supers * 2, weight.super_scales):
            return None
    elif factor == 2:
        scales = scales.float() / 2
    middle = 128 if values.min() < 0 else 0
    plain = weight._replace(scales=scales, super_scales=supers, zeros=middle + factor * weight.zeros, values=None)
    return plain, (values.int() + middle).tolist()


def _are_e4m3(values: Tensor) -> bool:
    if len(values) != 256:
        return False
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.equal(values.nan_to_num(), expected.nan_to_num()) and torch.equal(values.isnan(), expected.isnan())


def _has_bf16_values(weight: QuantizedWeight) -> bool:
    """Whether weights are scale * value, with bf16 values: 16, or 256 exact ones of which half are negative."""
    values = weight.values
    others = (weight.minimums, weight.super_scales)
    if values is None or isinstance(weight.zeros, Tensor) or weight.zeros or any(its is not None for its in others):
        return False
    if len(values) != 256:
        return len(values) == 16
    is_exact = torch.equal(values.bfloat16().float().nan_to_num(), values.nan_to_num())
    return is_exact and torch.equal(values[128:].nan_to_num(), -values[:128].nan_to_num())


def _pair_bytes(values: Tensor) -> Tensor:
    """uint8[2, 128]: lower bytes and upper bytes of values as bf16; for 256 values, those of the first half."""
    of_values = values[:128].bfloat16().view(torch.uint8).view(-1, 2).T
    return torch.nn.functional.pad(of_values, (0, 128 - of_values.shape[1])).contiguous()


def _without_both_corrections(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight with minimums alone, if it has both zeros of its own and minimums."""
    if weight.minimums is None or not isinstance(weight.zeros, Tensor):
        return weight
    scales, minimums = weight.scales.float(), weight.minimums.float()
    if weight.super_scales is not None and weight.super_minimums is not None:
        each = SUPER_GROUP // weight.group
        supers = (weight.super_scales, weight.super_minimums)
        by, less = (its.float().repeat_interleave(each, dim=-1)[..., : scales.shape[-1]] for its in supers)
        scales, minimums = scales * by, minimums * less
    minimums = minimums + scales * weight.zeros
    return weight._replace(scales=scales, minimums=minimums, zeros=0, super_scales=None, super_minimums=None)


def _of_one_type(weight: QuantizedWeight) -> tuple[Tensor, Tensor | None]:
    """Scales and minimums in the smallest type that holds both exactly."""
    found = [its for its in (weight.scales, weight.minimums) if its is not None]
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    for dtype in () if weight.super_scales is not None else dtypes:
        if all(its.dtype == dtype or torch.equal(its.to(dtype).float(), its.float()) for its in found):
            found = [its.to(dtype) for its in found]
            break
    return found[0], found[1] if len(found) > 1 else None


def round_up(n: int, unit: int) -> int:
    """The next multiple."""
    return -(-n // unit) * unit
