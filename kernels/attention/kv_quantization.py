"""Quantized keys and values: their format in pages, and how numbers are quantized.

A page of one layer's keys, or of its values, is uint8[Hk, head bytes]. The bytes of a head:

    codes   [page_size, code bytes]             of every position
    scales  fp16[page_size, numbers]            of every position
    unused                                      where another page group needs larger pages

int8, fp8_e4m3, fp8_e5m2: a code is a byte, and each head has one scale at each position: x = scale * code.

int4: 32 neighbouring numbers of a head form a group of 16 bytes. Byte i has number i in its low half and number i + 16
in its high half. Each group has two numbers, a scale and a minimum: x = minimum + scale * code. Heads are padded to
whole groups with codes of 0.

A position's numbers are quantized once, from its own values alone. So its bytes do not depend on the chunk in which it
was computed, and a page can be shared, copied and moved as bytes. Scales are rounded to fp16 before they are used to
make codes, so their rounding adds nothing to the error.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

KVFormatName = Literal["fp8_e4m3", "fp8_e5m2", "int8", "int4"]

GROUP = 32
"""Numbers that share a scale and a minimum in int4."""

LEAST_FP8_SCALE = 2.0**-14
"""The smallest normal fp16. Smaller numbers become subnormal fp8 codes, which are finer than subnormal scales."""

_MOST = 65504.0  # the largest fp16


class KVFormat(NamedTuple):
    """How the numbers of a head at one position are stored."""

    name: KVFormatName
    bits: int  # of a code
    largest: float  # the largest magnitude of a code
    fp8: torch.dtype | None = None  # the codes' dtype, if they are floats

    @property
    def has_groups(self) -> bool:
        """Whether each group has a scale and a minimum, instead of one scale for the head."""
        return self.bits == 4

    def code_bytes(self, head_dim: int) -> int:
        """Bytes of the codes of a head at one position."""
        return _num_groups(head_dim) * GROUP // 2 if self.has_groups else head_dim

    def num_scales(self, head_dim: int) -> int:
        """How many numbers accompany the codes: one scale, or a scale and a minimum for each group."""
        return 2 * _num_groups(head_dim) if self.has_groups else 1

    def head_bytes(self, head_dim: int) -> int:
        """Bytes of a head at one position."""
        return self.code_bytes(head_dim) + 2 * self.num_scales(head_dim)


KV_FORMATS: dict[str, KVFormat] = {
    each.name: each
    for each in (
        KVFormat("fp8_e4m3", 8, 448.0, torch.float8_e4m3fn),
        KVFormat("fp8_e5m2", 8, 57344.0, torch.float8_e5m2),
        KVFormat("int8", 8, 127.0),
        KVFormat("int4", 4, 15.0),
    )
}


class PageLayout(NamedTuple):
    """Where codes and scales are in the pages of a page group."""

    format: KVFormat
    page_size: int  # positions
    head_dim: int  # D, even

    @property
    def scales_at(self) -> int:
        """The first byte of a head's scales."""
        return self.page_size * self.format.code_bytes(self.head_dim)

    @property
    def used_bytes(self) -> int:
        """Bytes of a head in a page that are used."""
        return self.page_size * self.format.head_bytes(self.head_dim)

    def codes(self, pages: Tensor) -> Tensor:
        """uint8[..., head bytes] -> a view, uint8[..., page_size, code bytes]."""
        codes: Tensor = pages[..., : self.scales_at].unflatten(-1, (self.page_size, -1))
        return codes

    def scales(self, pages: Tensor) -> Tensor:
        """uint8[..., head bytes] -> a view, fp16[..., page_size, numbers]."""
        numbers = pages.view(torch.float16)[..., self.scales_at // 2 : self.used_bytes // 2]
        scales: Tensor = numbers.unflatten(-1, (self.page_size, -1))
        return scales


class Quantized(NamedTuple):
    """Heads of some positions."""

    codes: Tensor  # uint8[..., code bytes]
    scales: Tensor  # fp16[..., numbers]


def quantize(x: Tensor, format: KVFormat, scale: float | None = None) -> Quantized:
    """Quantize each head of each position by itself: the reference for every kernel that writes pages.

    Args:
        x: [..., D].
        format: of the codes.
        scale: one scale for all, from a checkpoint; it is rounded to fp16. None: each head has its own at each
            position. Groups always have their own.
    """
    x = x.float()
    if format.has_groups:
        return _quantize_groups(x, format)
    if scale is None:
        scales = x.abs().amax(-1, keepdim=True) / format.largest
    else:
        scales = torch.full((*x.shape[:-1], 1), scale, dtype=torch.float32, device=x.device)
    if format.fp8 is not None:
        scales = scales.clamp(min=LEAST_FP8_SCALE)
    stored = scales.clamp(max=_MOST).half()
    codes = (x / _divisor(stored)).clamp(-format.largest, format.largest)
    whole = codes.round().to(torch.int8) if format.fp8 is None else codes.to(format.fp8)
    return Quantized(whole.view(torch.uint8), stored)


def dequantize(its: Quantized, format: KVFormat, head_dim: int) -> Tensor:
    """fp32[..., D]: the reference for every kernel that reads pages."""
    if format.has_groups:
        halves = its.codes.unflatten(-1, (-1, GROUP // 2))
        numbers = torch.cat((halves & 15, halves >> 4), dim=-1).float()
        scales, minimums = its.scales.float().unflatten(-1, (-1, 2)).split(1, dim=-1)
        groups: Tensor = minimums + scales * numbers
        return groups.flatten(-2)[..., :head_dim]
    return its.codes.view(format.fp8 or torch.int8).float() * its.scales.float()


class KVScales(NamedTuple):
    """The scales by which a checkpoint divides a layer's keys and values."""

    k: float
    v: float


def write_quantized(pages: Tensor, layout: PageLayout, cells: Tensor, x: Tensor, scale: float | None = None) -> None:
    """Store heads in pages.

    Args:
        pages: uint8[num_pages, Hk, head bytes], contiguous, written.
        layout: of the pages.
        cells: int64[C], (page * Hk + head) * page_size + position in the page.
        x: [C, D].
        scale: as in `quantize`.
    """
    heads = pages.view(-1, pages.shape[-1])
    its = quantize(x, layout.format, scale)
    head, offset = cells // layout.page_size, cells % layout.page_size
    layout.codes(heads)[head, offset] = its.codes
    layout.scales(heads)[head, offset] = its.scales


def read_quantized(pages: Tensor, layout: PageLayout) -> Tensor:
    """uint8[..., head bytes] -> fp32[..., page_size, D]: the content of whole pages."""
    return dequantize(Quantized(layout.codes(pages), layout.scales(pages)), layout.format, layout.head_dim)


def _num_groups(head_dim: int) -> int:
    return -(-head_dim // GROUP)


def _divisor(scales: Tensor) -> Tensor:
    """fp32 without zeros: the numbers that a zero scale would divide are zero, or too small to matter."""
    scales = scales.float()
    return torch.where(scales == 0, 1.0, scales)


def _quantize_groups(x: Tensor, format: KVFormat) -> Quantized:
    head_dim = x.shape[-1]
    missing = _num_groups(head_dim) * GROUP - head_dim
    # Padding repeats a number of the group, so it changes neither the minimum nor the range.
    groups = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], missing)), dim=-1).unflatten(-1, (-1, GROUP))
    minimums = groups.amin(-1, keepdim=True).clamp(-_MOST, _MOST).half()
    above = groups - minimums.float()
    scales = (above.amax(-1, keepdim=True) / format.largest).clamp(0.0, _MOST).half()
    codes = (above / _divisor(scales)).round().clamp(0.0, format.largest).to(torch.uint8)
    if missing:
        codes[..., -1, GROUP - missing :] = 0
    low, high = codes.split(GROUP // 2, dim=-1)
    return Quantized((low | high << 4).flatten(-2), torch.cat((scales, minimums), dim=-1).flatten(-2))
