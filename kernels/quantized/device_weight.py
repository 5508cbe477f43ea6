"""A quantized matrix as GPUs read it: codes are packed bit by bit, scales take the fewest bytes that hold them exactly.

Codes are stored output by output in one or two planes: code = low | high << (bits of low). Their bits are divided into
2 = 2, 3 = 2 + 1, 4 = 4, 5 = 4 + 1, 6 = 4 + 2, 8 = 8. A byte of a plane has the bits of consecutive inputs, the first
input in the lowest bits. Only planes of 4 bits are in words of eight inputs, whose nibbles from the lowest on are those
of inputs 0, 2, 4, 6, 1, 3, 5 and 7. Thus neighbours are 16 bits apart, where GPUs want halves of a register to be
(`penstock.kernels.triton.quantized.nibbles`). Rows are padded with zeros to 16 bytes.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.quantized.weight import SUPER_GROUP, InputRounding, QuantizedWeight, stacked

Numbers = Literal["integers", "e4m3", "e2m1", "table"]
"""What codes stand for: themselves, the Open Compute Project's floats of 8 or 4 bits, or a table of values."""

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""Bits of a code -> bits of its planes, the low one first."""
BLOCK = 128
"""Outputs, and inputs, of a block with one scale, as matrix products of FP8 know it."""
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight inputs each nibble of a word is."""
_PACKED_AT_A_TIME = 1 << 24
"""How many numbers of a matrix are packed at a time; each intermediate tensor has a byte for each number."""
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class DeviceWeight(NamedTuple):
    """A `QuantizedWeight` [N, K], packed. Fields without an explanation are those of the same names there.

    128 is subtracted from integers of 8 bits and from their zeros, so that most matrices need no zeros.
    """

    planes: tuple[Tensor, ...]  # uint8[N, padded K * bits / 8], low plane first; int8 for integers of 8 bits
    bits: int
    num_inputs: int  # K
    numbers: Numbers
    group: int  # a power of two; or at least K, if there is one scale for each output
    scales: Tensor  # [N, J]; uint8 without super-scales stands for 2 ** (number - 127)
    zeros: Tensor | int  # uint8[N, J], or int8 if the plane is int8
    minimums: Tensor | None
    super_scales: Tensor | None
    super_minimums: Tensor | None
    values: Tensor | None  # the values of codes, for tables and also for floats
    order: Tensor | None
    inputs: InputRounding | None
    value_bytes: Tensor | None = None  # int32[16]: see `_value_bytes`; for tables of 16 values
    block_scales: Tensor | None = None  # fp32[ceil(N / 128), K / 128], if so many scales say what `scales` does

    @property
    def num_outputs(self) -> int:
        """N."""
        return self.planes[0].shape[-2]

    @property
    def device(self) -> torch.device:
        return self.planes[0].device

    @property
    def has_output_scales(self) -> bool:
        """Whether each output has a single scale, which can be applied to the finished sum."""
        return self.scales.shape[-1] == 1 and isinstance(self.zeros, int) and self.minimums is None

    @property
    def num_bytes(self) -> int:
        """Bytes in the device's memory."""
        others = (
            self.scales, self.zeros, self.minimums, self.super_scales, self.super_minimums, self.order,
            self.block_scales,
        )  # fmt: skip
        return sum(its.nbytes for its in (*self.planes, *others) if isinstance(its, Tensor))


def pack_for_device(weight: QuantizedWeight, device: torch.device | str) -> DeviceWeight:
    """Return a matrix, or experts' matrices, in the form that the products in `linear.py` take.

    Only small tensors of `weight` are kept.

    Raises:
        ValueError: `weight` has none of the forms that `QuantizedWeight` allows.
    """
    _check(weight)
    weight = _powers_of_two_as_groups(_plain_e2m1(_on(weight, torch.device(device))))
    codes, bits, zeros = weight.codes, weight.bits, weight.zeros
    numbers = _numbers(weight)
    if bits == 8 and numbers == "integers":
        planes: tuple[Tensor, ...] = ((codes ^ 128).view(torch.int8),)
        zeros = zeros - 128 if isinstance(zeros, int) else (zeros ^ 128).view(torch.int8)
    else:
        planes = _planes(codes, bits)
    return DeviceWeight(
        planes, bits, weight.num_inputs, numbers, weight.group,
        weight.scales if weight.super_scales is not None else _narrowest(weight.scales),
        zeros, weight.minimums, weight.super_scales, weight.super_minimums, weight.values, weight.order, weight.inputs,
        _value_bytes(weight.values) if numbers == "table" and bits == 4 else None,
        _block_scales(weight) if numbers == "e4m3" else None,
    )  # fmt: skip


def pack_experts_for_device(experts: Sequence[QuantizedWeight], device: torch.device | str) -> DeviceWeight:
    """As `pack_for_device` for stacked experts, but without an unpacked copy of all experts.

    Args:
        experts: [N, K] each, all alike.
        device: where the packed weight goes.
    """
    first = pack_for_device(experts[0], device)
    together = {name: its.new_empty(len(experts), *its.shape) for name, its in _of_each_output(first).items()}
    for i, expert in enumerate(experts):
        packed = first if i == 0 else pack_for_device(expert, device)
        its = _of_each_output(packed)
        if packed.numbers != first.numbers or any(its[name].dtype != room.dtype for name, room in together.items()):
            # A dtype that holds one expert's numbers may not hold another's.
            both = stacked(list(experts))
            if both is None:
                raise ValueError("experts that differ in more than their numbers")
            return pack_for_device(both, device)
        for name, room in together.items():
            room[i] = its[name]
    planes = tuple(together.pop(f"planes {i}") for i in range(len(first.planes)))
    changed: dict[str, Any] = {**together, "planes": planes, "block_scales": None}
    return first._replace(**changed)


def _of_each_output(weight: DeviceWeight) -> dict[str, Tensor]:
    names = ("scales", "zeros", "minimums", "super_scales", "super_minimums")
    found = {name: getattr(weight, name) for name in names}
    planes = {f"planes {i}": plane for i, plane in enumerate(weight.planes)}
    return {**planes, **{name: its for name, its in found.items() if isinstance(its, Tensor)}}


def unpacked(weight: DeviceWeight, outputs: slice | Tensor = slice(None), expert: int | None = None) -> QuantizedWeight:
    """Some outputs of the matrix, or of one expert's matrix, as they were before packing."""

    def of(its: Tensor) -> Tensor:
        return (its if expert is None else its[expert])[..., outputs, :]

    codes, shift = torch.zeros((), dtype=torch.uint8, device=weight.device), 0
    for plane, bits in zip(weight.planes, PLANES[weight.bits], strict=True):
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=weight.device)
        bytes_ = of(plane).view(torch.uint8)
        part = ((bytes_.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)
        if bits == 4:
            order = torch.tensor(NIBBLES, device=weight.device).argsort()
            part = part.unflatten(-1, (-1, 8)).index_select(-1, order).flatten(-2)
        codes = codes | part[..., : weight.num_inputs] << shift
        shift += bits
    scales, zeros = of(weight.scales), weight.zeros if isinstance(weight.zeros, int) else of(weight.zeros)
    if weight.planes[0].dtype == torch.int8:
        codes = codes ^ 128
        zeros = zeros + 128 if isinstance(zeros, int) else zeros.view(torch.uint8) ^ 128
    if weight.super_scales is None and scales.dtype == torch.uint8:
        scales = torch.exp2(scales.float() - 127)
    minimums, super_scales, super_minimums = (
        None if its is None else of(its) for its in (weight.minimums, weight.super_scales, weight.super_minimums)
    )
    return QuantizedWeight(
        codes, weight.bits, weight.group, scales, zeros, minimums, super_scales, super_minimums, weight.values,
        weight.order, weight.inputs,
    )  # fmt: skip


def _is_zero(zeros: Tensor | int) -> bool:
    return isinstance(zeros, int) and zeros == 0


def _check(weight: QuantizedWeight) -> None:
    codes, group = weight.codes, weight.group
    if weight.bits not in PLANES or codes.dtype != torch.uint8 or codes.ndim not in (2, 3) or group < 1:
        raise ValueError(f"no matrix: {codes.dtype} {tuple(codes.shape)} of {weight.bits} bits in groups of {group}")
    of_groups = (*codes.shape[:-1], -(-codes.shape[-1] // group))
    for name, its in weight.of_each_output().items():
        if name not in ("codes", "super_scales", "super_minimums") and its.shape != of_groups:
            raise ValueError(f"{name} are {tuple(its.shape)}, not {of_groups}")
    if weight.super_scales is not None and (SUPER_GROUP % group or group & (group - 1)):
        raise ValueError(f"groups of {group} do not fit super-groups of {SUPER_GROUP}")
    if weight.bits < 8 and isinstance(weight.zeros, Tensor) and bool((weight.zeros >= 128).any()):
        raise ValueError(f"zeros of {weight.bits} bits are at least 128")
    among = weight.inputs.group if weight.inputs is not None else None
    if among is not None and (among < 32 or among & (among - 1)):
        raise ValueError(f"inputs in groups of {among}: these can be 32, 64, 128, ...")
    if (weight.minimums is None) != (weight.super_minimums is None) and weight.super_scales is not None:
        raise ValueError("minimums and super-minimums go together")


def _on(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    moved: dict[str, Any] = {name: its.to(device) for name, its in weight._asdict().items() if isinstance(its, Tensor)}
    if weight.inputs is not None and weight.inputs.scale is not None:
        scale = weight.inputs.scale.to(device=device, dtype=torch.float32).reshape(())
        return weight._replace(**moved, inputs=weight.inputs._replace(scale=scale))
    return weight._replace(**moved)


def _numbers(weight: QuantizedWeight) -> Numbers:
    if weight.values is None:
        return "integers"
    values = weight.values.cpu()
    # Kernels multiply E2M1 by 2**126 times the scale, in bf16.
    if weight.bits == 4 and torch.equal(values, E2M1) and bool((weight.scales <= 2).all()):
        return "e2m1"
    # Kernels convert E4M3 by shifts, which do not produce NaN.
    if weight.bits == 8 and torch.equal(values.nan_to_num(), E4M3.nan_to_num()):
        return "table" if bool(((weight.codes & 127) == 127).any()) else "e4m3"
    return "table"


def _plain_e2m1(weight: QuantizedWeight) -> QuantizedWeight:
    """The same matrix. A table that is E2M1's times a power of two, as GGUF's is, is replaced by E2M1's."""
    values, scales = weight.values, weight.scales
    if weight.bits != 4 or values is None or not _is_zero(weight.zeros) or scales.dtype != torch.float32:
        return weight
    factor = float(values[2])
    is_power = factor > 0 and float(torch.frexp(values[2])[0]) == 0.5
    if not is_power or factor == 1 or not torch.equal(values.cpu() / factor, E2M1):
        return weight
    multiplied = scales * factor
    if not torch.equal(multiplied / factor, scales):
        return weight
    return weight._replace(values=E2M1.to(values.device), scales=multiplied)


def _powers_of_two_as_groups(weight: QuantizedWeight) -> QuantizedWeight:
    """The same matrix with groups of a power of two. A single group for all inputs stays as it is."""
    group, num_inputs = weight.group, weight.num_inputs
    power = group & -group
    if group >= num_inputs or group == power:
        return weight
    num_groups = -(-num_inputs // power)

    def spread(its: Tensor) -> Tensor:
        return its.repeat_interleave(group // power, dim=-1)[..., :num_groups].contiguous()

    names = ("scales", "zeros", "minimums")
    of_groups = {name: its for name, its in weight.of_each_output().items() if name in names}
    changed: dict[str, Any] = {name: spread(its) for name, its in of_groups.items()}
    return weight._replace(group=power, **changed)


def _planes(codes: Tensor, bits: int) -> tuple[Tensor, ...]:
    widths, num_inputs = PLANES[bits], codes.shape[-1]
    padding = -num_inputs % (128 // widths[-1])
    planes = tuple(codes.new_empty(*codes.shape[:-1], (num_inputs + padding) * width // 8) for width in widths)
    at_a_time = max(1, _PACKED_AT_A_TIME // num_inputs)
    for some, *of_planes in zip(*(its.flatten(0, -2).split(at_a_time) for its in (codes, *planes)), strict=True):
        padded, shift = torch.nn.functional.pad(some, (0, padding)), 0
        for width, plane in zip(widths, of_planes, strict=True):
            part = (padded >> shift) & (2**width - 1)
            if width == 4:
                order = torch.tensor(NIBBLES, device=codes.device)
                part = part.unflatten(-1, (-1, 8)).index_select(-1, order).flatten(-2)
            part = part.unflatten(-1, (-1, 8 // width))
            plane.copy_(part[..., 0])
            for place in range(1, 8 // width):
                plane |= part[..., place] << (place * width)
            shift += width
    return planes


def _value_bytes(values: Tensor | None) -> Tensor | None:
    """int32[16]: 16 values in bf16, and in fp16; the upper bytes of all and then the lower ones, four in a word."""
    if values is None:
        return None
    of_dtypes = [values.to(dtype).view(torch.uint8).view(16, 2) for dtype in (torch.bfloat16, torch.float16)]
    return torch.cat([its[:, upper] for its in of_dtypes for upper in (1, 0)]).view(torch.int32)


def _block_scales(weight: QuantizedWeight) -> Tensor | None:
    """The scales of blocks of 128 x 128, if that is what the matrix has; their rows are aligned to 16 bytes."""
    scales, num_inputs = weight.scales, weight.num_inputs
    is_plain = weight.codes.ndim == 2 and _is_zero(weight.zeros) and weight.minimums is None
    if not is_plain or weight.group != BLOCK or num_inputs % (4 * BLOCK):
        return None
    of_blocks = scales[::BLOCK].float()
    spread = of_blocks.repeat_interleave(BLOCK, dim=0)[: weight.num_outputs]
    return of_blocks.contiguous() if torch.equal(spread, scales.float()) else None


def _narrowest(scales: Tensor) -> Tensor:
    """The same numbers; if an output has several, in the fewest bytes that hold them exactly."""
    if scales.shape[-1] == 1:
        return scales.float()
    fraction, exponent = torch.frexp(scales.float())
    if bool(((fraction == 0.5) & (exponent > -126)).all()):
        return (exponent + 126).to(torch.uint8)
    if scales.dtype == torch.float32:
        for dtype in (torch.float16, torch.bfloat16):
            narrow = scales.to(dtype)
            if torch.equal(narrow.float(), scales):
                return narrow
    return scales.contiguous()
