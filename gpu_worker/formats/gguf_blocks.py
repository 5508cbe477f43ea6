"""GGUF's block types: from the bytes of a file to a `QuantizedWeight`.

A row of a matrix is a sequence of blocks of 32 or 256 numbers. The layouts are those of ggml's `block_*` structs
(ggml-common.h). Each function here reads one of these layouts, for all blocks of a matrix at once.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.quantized.weight import QuantizedWeight
from penstock.models.formats.gguf import GGUFBlocks
from penstock.models.gguf.block_types import BLOCK_TYPES

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The values of E2M1, doubled; block scales are halved instead."""

_LOW_HALVES = int.from_bytes(b"\x0f" * 8, "little")
_TOP_BITS = int.from_bytes(b"\x80" * 8, "little", signed=True)
_FIFTH_BITS = torch.tensor([sum((byte >> bit & 1) << 8 * bit + 4 for bit in range(8)) for byte in range(256)])
"""For each byte, eight bytes as one number."""


class _Parts(NamedTuple):
    """The result of a block type's function. All tensors have the leading axes [..., blocks of a row]."""

    codes: Tensor  # uint8[..., numbers of a block]
    scales: Tensor  # [..., groups of a block]
    zeros: int = 0
    minimums: Tensor | None = None  # [..., groups of a block]
    super_scales: Tensor | None = None  # fp16[..., 1]
    super_minimums: Tensor | None = None  # fp16[..., 1]
    values: tuple[int, ...] | None = None


def decode(format: GGUFBlocks, parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """As `Decode`."""
    return quantized_weight(format.block_type, parts["blocks"])


def quantized_weight(block_type: str, data: Tensor) -> QuantizedWeight:
    """Decode a matrix, or a stack of experts' matrices.

    Args:
        block_type: ggml's name, such as "Q4_K"; one of `LAYOUTS`.
        data: uint8[..., N, bytes of a row].
    """
    bits, group, read = _READERS[block_type]
    parts = read(data.unflatten(-1, (-1, BLOCK_TYPES[block_type].num_bytes)))

    def row(of_blocks: Tensor) -> Tensor:
        return of_blocks.flatten(-2)

    def row_or_none(of_blocks: Tensor | None) -> Tensor | None:
        return None if of_blocks is None else row(of_blocks)

    return QuantizedWeight(
        codes=row(parts.codes),
        bits=bits,
        group=group,
        scales=row(parts.scales),
        zeros=parts.zeros,
        minimums=row_or_none(parts.minimums),
        super_scales=row_or_none(parts.super_scales),
        super_minimums=row_or_none(parts.super_minimums),
        values=None if parts.values is None else torch.tensor(parts.values, dtype=torch.float32),
    )


def _q8_0(blocks: Tensor) -> _Parts:
    """Adds 128 to int8 codes. They are copied in pairs of bytes, and then changed eight at a time."""
    pairs = blocks.view(torch.int16)
    codes = pairs[..., 1:].contiguous()
    codes.view(torch.int64).bitwise_xor_(_TOP_BITS)
    return _Parts(codes.view(torch.uint8), pairs[..., :1].contiguous().view(torch.float16), 128)


def _q4_0(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[..., 2:]), _half(blocks, 0), 8)


def _q4_1(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[..., 4:]), _half(blocks, 0), minimums=-_half(blocks, 2))


def _q5_0(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]), _half(blocks, 0), 16)


def _q5_1(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8])
    return _Parts(codes, _half(blocks, 0), minimums=-_half(blocks, 2))


def _q2_k(blocks: Tensor) -> _Parts:
    of_groups = blocks[..., :16]
    return _Parts(
        _planes(blocks[..., 16:80], 32, 2),
        of_groups & 15,
        minimums=of_groups >> 4,
        super_scales=_half(blocks, 80),
        super_minimums=_half(blocks, 82),
    )


def _q3_k(blocks: Tensor) -> _Parts:
    """The third bits are one plane. A scale of 6 bits has 4 in the first 8 bytes, and 2 in the last 4 bytes."""
    codes = _planes(blocks[..., 32:96], 32, 2) | _planes(blocks[..., :32], 32, 1, above=2)
    low = torch.cat((blocks[..., 96:104] & 15, blocks[..., 96:104] >> 4), dim=-1)
    scales = low | _planes(blocks[..., 104:108], 4, 2, above=4)
    return _Parts(codes, (scales - 32).view(torch.int8), 4, super_scales=_half(blocks, 108))


def _q4_k(blocks: Tensor) -> _Parts:
    return _with_k_scales(_planes(blocks[..., 16:], 32, 4), blocks)


def _q5_k(blocks: Tensor) -> _Parts:
    return _with_k_scales(_planes(blocks[..., 48:], 32, 4) | _planes(blocks[..., 16:48], 32, 1, above=4), blocks)


def _q6_k(blocks: Tensor) -> _Parts:
    codes = _planes(blocks[..., :128], 64, 4) | _planes(blocks[..., 128:192], 32, 2, above=4)
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return _Parts(codes, scales, 32, super_scales=_half(blocks, 208))


def _iq4_nl(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[..., 2:]), _half(blocks, 0), values=_IQ4)


def _iq4_xs(blocks: Tensor) -> _Parts:
    """A scale of 6 bits has 4 in bytes 4 to 8, and 2 in bytes 2 and 3."""
    codes = _nibbles(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    high = torch.stack([blocks[..., 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), dim=-1).flatten(-2)
    scales = ((low | high << 4) - 32).view(torch.int8)
    return _Parts(codes, scales, super_scales=_half(blocks, 0), values=_IQ4)


def _mxfp4(blocks: Tensor) -> _Parts:
    """A scale is 2**(e - 128). In fp32 the exponent bits are e - 1; for e < 2 it is subnormal."""
    exponents = blocks[..., :1].int()
    bits = torch.where(exponents < 2, 0x200000 << exponents, exponents - 1 << 23)
    return _Parts(_nibbles(blocks[..., 1:]), bits.view(torch.float32), values=_FP4)


def _with_k_scales(codes: Tensor, blocks: Tensor) -> _Parts:
    """Q4_K's and Q5_K's 8 scales and 8 minimums of 6 bits in 12 bytes: 4 of each are whole, with 2 bits of another."""
    scales, minimums, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    return _Parts(
        codes,
        torch.cat((scales & 63, rest & 15 | scales >> 6 << 4), dim=-1),
        minimums=torch.cat((minimums & 63, rest >> 4 | minimums >> 6 << 4), dim=-1),
        super_scales=_half(blocks, 0),
        super_minimums=_half(blocks, 2),
    )


def _half(blocks: Tensor, begin: int) -> Tensor:
    """The fp16 number at this byte of each block, [..., 1]."""
    return blocks.view(torch.float16)[..., begin // 2 : begin // 2 + 1].contiguous()


def _nibbles(data: Tensor) -> Tensor:
    """The low halves of 16 bytes, then their high halves."""
    words = _copied(data).view(torch.int64)
    halves = (words & _LOW_HALVES, (words >> 4).bitwise_and_(_LOW_HALVES))
    of_16_bytes = [half.view(torch.complex128) for half in halves]  # so that 16 bytes move at once
    return torch.stack(of_16_bytes, dim=-1).view(torch.uint8).flatten(-2)


def _bits(data: Tensor) -> Tensor:
    """The bits of each byte, the lowest first, as fifth bits of codes."""
    return _FIFTH_BITS.to(data.device)[data.int()].view(torch.uint8)


def _copied(data: Tensor) -> Tensor:
    """A contiguous copy, made in pairs of bytes if that is possible."""
    are_pairs = data.stride(-2) % 2 == 0 and data.storage_offset() % 2 == 0
    return (data.view(torch.int16) if are_pairs else data).contiguous().view(torch.uint8)


def _planes(data: Tensor, width: int, bits: int, *, above: int = 0) -> Tensor:
    """For each `width` bytes: the lowest bits of all, then the next bits of all, and so on; shifted up by `above`."""
    kind = torch.int64 if width % 8 == 0 else torch.uint8  # torch's shifts of single bytes take several times as long
    words = _copied(data).unflatten(-1, (-1, width)).view(kind)
    mask = int.from_bytes(bytes([(1 << bits) - 1]) * kind.itemsize, "little")
    planes = [(words >> shift).bitwise_and_(mask).bitwise_left_shift_(above) for shift in range(0, 8, bits)]
    return torch.stack(planes, dim=-2).view(torch.uint8).flatten(-3)


_READERS: dict[str, tuple[int, int, Callable[[Tensor], _Parts]]] = {
    "Q8_0": (8, 32, _q8_0),
    "Q4_0": (4, 32, _q4_0),
    "Q4_1": (4, 32, _q4_1),
    "Q5_0": (5, 32, _q5_0),
    "Q5_1": (5, 32, _q5_1),
    "Q2_K": (2, 16, _q2_k),
    "Q3_K": (3, 16, _q3_k),
    "Q4_K": (4, 32, _q4_k),
    "Q5_K": (5, 32, _q5_k),
    "Q6_K": (6, 16, _q6_k),
    "IQ4_NL": (4, 32, _iq4_nl),
    "IQ4_XS": (4, 32, _iq4_xs),
    "MXFP4": (4, 32, _mxfp4),
}
"""By type: the bits of a code, the size of a group, and the function that reads blocks."""
LAYOUTS = {block_type: (bits, group) for block_type, (bits, group, _) in _READERS.items()}
"""The supported types, with the bits of a code and the size of a group."""
