"""What the rows of a step add to the model's products: low-rank matrices that differ from row to row (LoRA).

    y = W x          becomes          y = W x + B (A x)

for tokens of rows that have a slot, with the slot's A and B. The places in the model where this can happen are its
sites: one for each product of a decoder layer. A product may stack several tensors of the checkpoint, each with its own
A and B; then each adds to its own outputs.

(LoRA: Hu et al. 2021, arXiv:2106.09685. Rows of different adapters in one batch: Sheng et al. 2023, arXiv:2311.03285.)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.gpu_worker.devices.device import Device, Int32Array, IntArray
from penstock.gpu_worker.models.device_adapters import DeviceAdapters, Packed, SiteRoom
from penstock.gpu_worker.models.linear import Linear
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.kernels.activation import Activation
from penstock.kernels.native.adapting import NativeAdapters, NativeFactors, Segment
from penstock.kernels.native.library import Library, PackedLinear
from penstock.models.weights.sources import Cut, Ranges


class Factors(NamedTuple):
    """What an adapter adds to one of the checkpoint's tensors: b @ (a @ x)."""

    a: Tensor  # [rank, inputs], of the whole tensor
    b: Tensor  # [outputs, rank], already scaled


class SitePart(NamedTuple):
    """A tensor of a site's product."""

    module: str  # its name without ".weight"
    num_outputs: int  # of the whole tensor, as num_inputs
    num_inputs: int
    cut: Cut  # what this rank has of it


class Site(NamedTuple):
    """A product to which rows can add something."""

    parts: tuple[SitePart, ...]  # whose outputs are stacked
    order: tuple[int, ...] | None  # output i is output order[i] of the stack

    def room(self, max_rank: int) -> SiteRoom:
        """What `segments` returns at most."""
        if self.order is not None:
            return SiteRoom(((0, len(self.order)),), max_rank * len(self.parts))
        sizes = [_size(part.cut.outputs, part.num_outputs) for part in self.parts]
        ends = np.cumsum(sizes).tolist()
        return SiteRoom(tuple((end - size, end) for size, end in zip(sizes, ends, strict=True)), max_rank)

    def segments(self, factors: Mapping[str, Factors]) -> list[Segment]:
        """What this rank adds to the product, of the tensors that are named."""
        found, first = [], 0
        for part in self.parts:
            num_outputs = _size(part.cut.outputs, part.num_outputs)
            if (its := factors.get(part.module)) is not None:
                a, b = _cut(its.a.t(), part.cut.inputs).t().contiguous(), _cut(its.b, part.cut.outputs)
                found.append(Segment(first, first + num_outputs, a, b.contiguous()))
            first += num_outputs
        if self.order is None or not found:
            return found
        a = torch.cat([each.a for each in found])
        b, at = a.new_zeros(first, len(a)), 0
        for each in found:
            b[each.first : each.end, at : at + len(each.a)] = each.b
            at += len(each.a)
        return [Segment(0, len(self.order), a, b[torch.tensor(self.order)])]


def _size(ranges: Ranges | None, whole: int) -> int:
    return whole if ranges is None else sum(end - begin for begin, end in ranges)


def _cut(rows: Tensor, ranges: Ranges | None) -> Tensor:
    return rows if ranges is None else torch.cat([rows[begin:end] for begin, end in ranges])


class Made(NamedTuple):
    """What a slot can add: by the numbers of sites for torch or the native kernels, or packed for Triton's."""

    segments: Mapping[int, Sequence[Segment]] = {}
    native: Mapping[int, NativeFactors] = {}
    packed: Packed | None = None

    def on(self, device: torch.device) -> "Made":
        """The same on a device. The native kernels, and torch on a CPU, read it where it is."""
        return self if self.packed is None else self._replace(packed=self.packed.on(device))

    @property
    def num_bytes(self) -> int:
        """Of all matrices."""
        segments = sum(its.a.nbytes + its.b.nbytes for each in self.segments.values() for its in each)
        native = sum(part.nbytes for its in self.native.values() for part in its)
        return segments + native + (0 if self.packed is None else self.packed.data.nbytes)


class Adapters:
    """The sites of a model, what each slot adds to them, and which row has which slot.

    The native kernels add it once a product is packed for them, Triton's where launches are compiled, torch otherwise.
    """

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.native = NativeAdapters()
        self.rows: Int32Array = np.empty(0, dtype=np.int32)  # int32[R], the slot of each row; negative: none
        self._is_native = False
        self._on_device: DeviceAdapters | None = None
        self._segments: dict[tuple[int, int], Sequence[Segment]] = {}  # by site and slot, where torch computes
        self._tokens: Sequence[tuple[int, Tensor]] = ()  # of the step: slot, and int64[n], the indices of its tokens
        self.is_adding = False
        """Whether some of the step's tokens add something."""

    def prepare(self, num_slots: int, num_rows: int, max_rank: int, dtype: torch.dtype, device: Device) -> None:
        """Have room for so many, of these ranks and in this dtype. Without it, nothing can be added."""
        self.rows = np.full(num_rows, -1, dtype=np.int32)
        if device.compiles_launches:
            rooms = [site.room(max_rank) for site in self.sites]
            self._on_device = DeviceAdapters(rooms, num_slots, num_rows, dtype, device)
        else:
            self.native.prepare(num_slots, self.rows)

    @property
    def can_be_captured(self) -> bool:
        """Whether what is added, and to which rows, is read on the device alone."""
        return self._on_device is not None

    @property
    def modules(self) -> dict[str, SitePart]:
        """The tensors that something can be added to, by their modules' names in the checkpoint."""
        return {part.module: part for site in self.sites for part in site.parts}

    def add_site(self, linear: Linear, site: Site) -> "AdaptedLinear":
        """The product with what rows add to it."""
        self.sites.append(site)
        return AdaptedLinear(linear, len(self.sites) - 1, self)

    def made(self, factors: Mapping[str, Factors]) -> Made:
        """What a slot will add, in the host's memory; `put` takes it on the device. Any thread may call this."""
        found = {number: its for number, site in enumerate(self.sites) if (its := site.segments(factors))}
        if self._on_device is not None:
            return Made(packed=self._on_device.made(found))
        if self._is_native:
            return Made(native={number: self.native.made(number, its) for number, its in found.items()})
        return Made(found)

    def put(self, slot: int, made: Made) -> None:
        """A slot adds this from the next step on, and nothing else."""
        self.clear(slot)
        if self._on_device is not None and made.packed is not None:
            self._on_device.put(slot, made.packed)
        for site, its in made.native.items():
            self.native.put(site, slot, its)
        for site, segments in made.segments.items():
            self._segments[site, slot] = segments

    def clear(self, slot: int) -> None:
        """A slot adds nothing any more."""
        if self._on_device is not None:
            self._on_device.clear(slot)
            return
        self.native.clear(slot)
        for key in [key for key in self._segments if key[1] == slot]:
            del self._segments[key]

    def give(self, rows: Iterable[tuple[int, int]]) -> None:
        """Let rows have slots: pairs of both; a negative slot is none."""
        for row, slot in rows:
            self.rows[row] = slot
        self._tokens, self.is_adding = (), False
        if self._on_device is not None:
            self._on_device.give(self.rows)
        else:
            self.native.count()

    def begin(self, rows: IntArray, num_new: IntArray) -> None:
        """A step of these rows, with so many tokens each, is about to be computed."""
        if self._is_native:
            return
        of_rows = self.rows[rows]
        self.is_adding = bool((of_rows >= 0).any())
        if self._on_device is None:
            slots = np.repeat(of_rows, num_new)
            found = [(int(slot), np.flatnonzero(slots == slot)) for slot in np.unique(slots) if slot >= 0]
            self._tokens = [(slot, torch.from_numpy(tokens)) for slot, tokens in found]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Steps that are captured meanwhile add what is in the tables when they are replayed."""
        self.is_adding = True
        try:
            yield
        finally:
            self.is_adding = False

    def added(self, site: int, x: Tensor, y: Tensor, step: ForwardInputs | None) -> Tensor:
        """y [T, out] with what the step's tokens add to the product of x [T, in]."""
        if not self.is_adding:
            return y
        if self._on_device is not None:
            assert step is not None, "sites are in layers"
            return self._on_device.added(site, x, y, step)
        for slot, tokens in self._tokens:
            for first, end, a, b in self._segments.get((site, slot), ()):
                inner = x.index_select(0, tokens).to(a.dtype) @ a.t()
                y[:, first:end].index_add_(0, tokens, (inner @ b.t()).to(y.dtype))
        return y

    def note_packed(self, packed: PackedLinear) -> None:
        """A product is part of a native program."""
        self._is_native = True
        self.native.add(packed)


class AdaptedLinear(NamedTuple):
    """See `Linear`. Adds what the step's rows add: `Adapters.begin` was told which rows these are."""

    linear: Linear
    site: int
    adapters: Adapters

    def __call__(self, x: Tensor, step: ForwardInputs | None) -> Tensor:
        return self.adapters.added(self.site, x, self.linear(x, step), step)

    def of_activation(self, x: Tensor, activation: Activation, step: ForwardInputs) -> Tensor:
        y = self.linear.of_activation(x, activation, step)  # which may be one kernel, so its bits must stay
        return self.adapters.added(self.site, activation(x), y, step) if self.adapters.is_adding else y

    def pack(self, library: Library, *, interleaved: bool = False, rounds_inputs: bool = False) -> PackedLinear:
        packed = self.linear.pack(library, interleaved=interleaved, rounds_inputs=rounds_inputs)._replace(
            site=self.site
        )
        self.adapters.note_packed(packed)
        return packed
