"""What rows add to a model's products on a device that compiles launches (`kernels/adapting.py`).

Tables on the device say which slot a row has, and where a slot's matrices are at each product. They change between
steps, in the order of the launches; the tensors themselves stay, so that captured graphs read what they say now.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.gpu_worker.devices.device import Device, Int32Array
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.kernels.adapting import LowRankTable, add_low_rank, group_by_slot
from penstock.kernels.experts.experts import BlockedRows
from penstock.kernels.native.adapting import Segment

_ALIGNMENT = 64
"""Numbers: a matrix begins at a multiple of them."""


class SiteRoom(NamedTuple):
    """What a product's site has room for."""

    segments: tuple[tuple[int, int], ...]  # outputs [first, end) of each
    most_rank: int


class Packed(NamedTuple):
    """All matrices of an adapter, one behind the other: A [rank, inputs] and B^T [rank, outputs] of each segment."""

    data: Tensor  # [numbers]
    begins: npt.NDArray[np.int64]  # int64[segments of all sites, 2], where each is in `data`
    ranks: Int32Array  # int32[segments of all sites]; 0: it has none

    def on(self, device: torch.device) -> "Packed":
        """The same on a device."""
        return self._replace(data=self.data.to(device))


class DeviceAdapters:
    """The tables of one model's sites."""

    def __init__(self, sites: Sequence[SiteRoom], num_slots: int, num_rows: int, dtype: torch.dtype, device: Device):
        """`dtype`: of activations, and of the matrices."""
        self._device = device
        self._dtype = dtype
        self._num_slots = num_slots
        on, count = device.torch_device, sum(len(site.segments) for site in sites)
        self._slots = torch.full((num_rows,), -1, dtype=torch.int32, device=on)
        self._addresses = torch.zeros((num_slots, count, 2), dtype=torch.int64, device=on)
        self._ranks = torch.zeros((num_slots, count), dtype=torch.int32, device=on)
        places = torch.tensor([its for site in sites for its in site.segments], dtype=torch.int32, device=on)
        self._tables: list[LowRankTable] = []
        self._first: list[int] = []  # a site's first segment among those of all
        first = 0
        for site in sites:
            end = first + len(site.segments)
            addresses, ranks = self._addresses[:, first:end], self._ranks[:, first:end]
            self._tables.append(LowRankTable(addresses, ranks, places[first:end], site.segments, site.most_rank))
            self._first.append(first)
            first = end
        self._kept: dict[int, Tensor] = {}  # by slot: what the tables point to
        self._grouped: tuple[Tensor, BlockedRows] | None = None  # of the forward pass with these starts of rows

    def made(self, found: Mapping[int, Sequence[Segment]]) -> Packed:
        """Arrange what an adapter adds at sites. Any thread may call this."""
        begins, ranks = np.zeros(self._addresses.shape[1:], dtype=np.int64), np.zeros(self._ranks.shape[1], np.int32)
        pieces: list[Tensor] = []
        size = 0
        for site, segments in found.items():
            known = {first: number for number, (first, _) in enumerate(self._tables[site].segments)}
            for first, _, a, b in segments:
                number = self._first[site] + known[first]
                ranks[number] = len(a)
                for half, matrix in enumerate((a, b.t())):
                    begins[number, half] = size
                    numbers = matrix.reshape(-1).to(self._dtype)
                    pieces += [numbers, numbers.new_zeros(-len(numbers) % _ALIGNMENT)]
                    size += len(numbers) + len(pieces[-1])
        return Packed(torch.cat(pieces) if pieces else torch.zeros(0, dtype=self._dtype), begins, ranks)

    @torch.inference_mode()
    def put(self, slot: int, packed: Packed) -> None:
        """A slot adds this from the next launch on; its matrices are on the device."""
        self._kept[slot] = packed.data
        addresses = packed.data.data_ptr() + packed.begins * self._dtype.itemsize
        self._addresses[slot].copy_(self._device.upload(addresses))
        self._ranks[slot].copy_(self._device.upload(packed.ranks))

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """A slot adds nothing any more."""
        if self._kept.pop(slot, None) is not None:
            self._ranks[slot].zero_()

    @torch.inference_mode()
    def give(self, slots: Int32Array) -> None:
        """Which slot each row has from the next launch on; negative: none."""
        self._slots.copy_(self._device.upload(slots))

    def added(self, site: int, x: Tensor, y: Tensor, step: ForwardInputs) -> Tensor:
        """y [T, outputs], in place, plus what the rows of a step add to the product of x [T, inputs]."""
        starts = step.query_start_loc
        if self._grouped is None or self._grouped[0] is not starts:
            self._grouped = starts, group_by_slot(step.rows, starts, self._slots, x.shape[0], self._num_slots)
        return add_low_rank(x.to(self._dtype), y, self._tables[site], self._grouped[1])
