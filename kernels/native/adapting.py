"""What rows add to products on the native CPU kernels (`operations/adapting.h`)."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.native.library import UNIT, PackedLinear
from penstock.kernels.native.operations.structs import numbers, pointers
from penstock.kernels.native.quantized.layout import round_up

_LANES = 16


class Segment(NamedTuple):
    """What is added to outputs [first, end) of a product."""

    first: int
    end: int
    a: Tensor  # [rank, inputs]
    b: Tensor  # [end - first, rank]


class NativeFactors(NamedTuple):
    """As `LowRank` in adapting.h."""

    a: Tensor  # [segments * rank, inputs in units of 16]
    b: Tensor  # [outputs in whole units / 16, rank, 16]
    segments: Tensor  # uint8, of each 16 outputs


class LowRank(ctypes.Structure):
    _fields_ = (*pointers("a", "b", "segments"), *numbers("rank", "num_inner", "is_bf16"))


class AdaptersStruct(ctypes.Structure):
    _fields_ = (*pointers("of_sites", "slots"), *numbers("num_slots", "num_rows", "num_adapted"))


class NativeAdapters:
    """The tables that a program reads in each step: which slot a row has, and a slot's matrices at each product.

    They may be changed between steps only.
    """

    def __init__(self) -> None:
        self._layouts: dict[int, PackedLinear] = {}  # of the products with sites
        self._kept: dict[tuple[int, int], NativeFactors] = {}
        self.struct = AdaptersStruct()

    def prepare(self, num_slots: int, rows: npt.NDArray[np.int32]) -> None:
        """Have room, once all products are known. `rows`: int32[R], each row's slot; it is read in place."""
        self._num_slots, self._rows = num_slots, rows
        self._table = (LowRank * (num_slots * (max(self._layouts, default=-1) + 1)))()
        self.struct.of_sites, self.struct.slots = ctypes.addressof(self._table), rows.ctypes.data
        self.struct.num_slots, self.struct.num_rows = num_slots, len(rows)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)

    def add(self, packed: PackedLinear) -> None:
        """A product with a site is in the program."""
        self._layouts[packed.site] = packed

    def made(self, site: int, segments: Sequence[Segment]) -> NativeFactors:
        """What is added to outputs of a product, as the kernels read it; fp32 or bf16. Any thread may call this."""
        packed, dtype = self._layouts[site], segments[0].a.dtype
        rank = max(each.a.shape[0] for each in segments)
        aligned = all(edge % _LANES == 0 or edge == packed.num_outputs for each in segments for edge in each[:2])
        if not aligned:  # then the segments are one, with zeros where a segment adds nothing
            rank = sum(each.a.shape[0] for each in segments)
        inner = torch.zeros(rank * (len(segments) if aligned else 1), round_up(packed.num_inputs, _LANES), dtype=dtype)
        b = torch.zeros(packed.num_outputs, rank, dtype=dtype)
        numbers_of = torch.zeros(packed.num_outputs)
        at = 0
        for number, (first, end, of_inputs, of_outputs) in enumerate(segments):
            count = of_inputs.shape[0]
            at = number * rank if aligned else at
            inner[at : at + count, : packed.num_inputs] = of_inputs
            b[first:end, (0 if aligned else at) :][:, :count] = of_outputs
            numbers_of[first:end] = number if aligned else 0
            at += count
        by_rank = torch.stack([packed.padded(row) for row in b.t()]).to(dtype)
        by_rank = functional.pad(by_rank, (0, -by_rank.shape[1] % UNIT))
        of_groups = functional.pad(packed.padded(numbers_of), (0, by_rank.shape[1] - packed.num_packed))
        of_groups = of_groups.view(-1, _LANES).amax(-1).byte()
        in_groups = by_rank.view(rank, -1, _LANES).transpose(0, 1).contiguous()
        return NativeFactors(inner, in_groups, of_groups)

    def put(self, site: int, slot: int, its: NativeFactors) -> None:
        """A slot adds this to a product from now on."""
        self._kept[site, slot] = its
        entry = self._table[site * self._num_slots + slot]
        entry.a, entry.b, entry.segments = (each.data_ptr() for each in its)
        entry.rank, entry.num_inner, entry.is_bf16 = its.b.shape[1], len(its.a), its.a.dtype == torch.bfloat16

    def clear(self, slot: int) -> None:
        """A slot adds nothing any more."""
        for key in [key for key in self._kept if key[1] == slot]:
            del self._kept[key]
            entry = self._table[key[0] * self._num_slots + slot]
            entry.a = entry.b = None

    def count(self) -> None:
        """Note how many rows have a slot. Call this when rows come and go."""
        self.struct.num_adapted = int((self._rows >= 0).sum())
