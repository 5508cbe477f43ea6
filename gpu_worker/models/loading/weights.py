"""From a checkpoint's tensors to the weights that blocks take."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.gpu_worker.models.adapters import Adapters, Site, SitePart
from penstock.gpu_worker.models.linear import (
    Embedding,
    ExpertLinear,
    JoinedLinear,
    Linear,
    PlainEmbedding,
    PlainExperts,
    PlainLinear,
)
from penstock.gpu_worker.models.quantized import (
    DeviceEmbedding,
    DeviceExperts,
    DeviceLinear,
    QuantizedEmbedding,
    QuantizedExperts,
    QuantizedLinear,
)
from penstock.gpu_worker.parallel.alone import ALONE
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.kernels.attention.kv_quantization import KVScales
from penstock.kernels.native.library import Library
from penstock.kernels.quantized.linear import pack_experts_for_device, pack_for_device
from penstock.kernels.quantized.weight import QuantizedWeight, are_alike, dequantized, joined
from penstock.models.files.source import Checkpoint
from penstock.models.weights.sources import Cut, LinearSource, Ranges, Source


class WeightReader(NamedTuple):
    """Reads each tensor of a checkpoint once, and joins weights that are computed together."""

    read: Callable[[str, Sequence[Ranges | None]], Tensor]
    """Reads some ranges of each axis of a tensor (None: all of an axis). The result may have any dtype and device."""
    is_bf16: bool  # whether all tensors that are not quantized are stored in bf16
    dtype: torch.dtype  # of activations and KV, and of weights except as `library` allows
    device: torch.device  # where weights go
    library: Library | None = None
    """The native CPU kernels, if the model is made for them. They read bf16 weights directly, whatever the dtype. That
    halves the bytes that a step reads, and loses nothing."""
    checkpoint: Checkpoint | None = None
    """The source of the tensors, for a builder that reads it in its own way; None for random weights."""
    read_quantized: Callable[[str, Cut], QuantizedWeight | None] = lambda name, cut: None
    """Reads a quantized weight, or a part of it, by its name; returns None for weights that `read` reads."""
    kv_scales: Callable[[str], KVScales | None] = lambda attention: None
    """The checkpoint's KV scales of an attention, by its name; None if there are none for this type of KV."""
    are_packed: bool = False
    """Whether matrices are read only to be packed. Then matrices that need no conversion are not copied, and may be in
    the file's own memory."""
    adapters: Adapters | None = None
    """Gets a site for each product, so that rows can add something to it; None: none can."""
    ranks: Ranks = ALONE
    """The ranks that hold the model together; the sources are cut for this rank."""

    def tensor(self, source: Source, dtype: torch.dtype | None = None) -> Tensor:
        """A weight, in the reader's dtype if no other is given. Each of its tensors is copied straight to its place.

        Quantized tensors are dequantized.
        """
        dtype = dtype or self.dtype
        shapes = [source.part_shape(i) for i in range(len(source.names))]
        if source.is_transposed:
            shapes = [(*shape[:-2], *shape[:-3:-1]) for shape in shapes]
        rows = [shape[0] for shape in shapes]
        stack = torch.empty((sum(rows), *shapes[0][1:]), dtype=dtype, device=self.device)
        for i, part in enumerate(torch.split(stack, rows)):
            quantized = self.read_quantized(source.names[i], source.cut(i))
            if quantized is not None:
                part.copy_(dequantized(quantized))
                continue
            stored = self._stored(source, i)
            part.copy_(stored.transpose(-1, -2) if source.is_transposed else stored)
        if source.num_stacked:
            stack = stack.view(source.num_stacked, -1, *stack.shape[1:])
        if source.order is not None:
            stack = stack.index_select(source.axis, torch.tensor(source.order, device=self.device))
        return stack

    def plain_linear(self, source: LinearSource) -> PlainLinear:
        """A product with a float weight, even if the stored one is quantized."""
        return PlainLinear(self._matrix(source.weight), self._bias(source))

    def linear(self, source: LinearSource) -> Linear:
        """A product, with its bias if it has one."""
        weight = source.weight
        parts = self._quantized_parts(weight)
        orders = None if all(part is None for part in parts) else _orders(weight)
        if orders is None:
            return self._adapted(self.plain_linear(source), weight, weight.order)
        bias = self._bias(source)
        products: list[Linear] = []
        first = 0
        for alike in _runs(parts):
            end = first + sum(_num_outputs(weight, i) for i in alike)
            its_bias = None if bias is None else bias[first:end]
            product = self._product(weight, alike, parts, orders, its_bias)
            order = None if weight.order is None else tuple(each - first for each in weight.order[first:end])
            products.append(self._adapted(product, weight, order, alike))
            first = end
        return products[0] if len(products) == 1 else JoinedLinear(tuple(products))

    def _adapted(
        self, linear: Linear, weight: Source, order: tuple[int, ...] | None, alike: Sequence[int] | None = None
    ) -> Linear:
        """The product with a site, if rows can add something to it: of all the tensors, or of those alike."""
        if self.adapters is None:
            return linear
        of = range(len(weight.names)) if alike is None else alike
        parts = tuple(
            SitePart(
                weight.names[i].removesuffix(".weight"),
                weight.num_outputs(i),
                weight.shapes[i][-2 if weight.is_transposed else -1],
                weight.cut(i),
            )
            for i in of
        )
        return self.adapters.add_site(linear, Site(parts, order))

    def experts(self, source: LinearSource) -> ExpertLinear:
        """The products of all experts."""
        bias = self._bias(source)
        weights = self._quantized_experts(source.weight)
        if weights is None:
            return PlainExperts(self.tensor(source.weight), bias)
        if self.are_packed:
            return QuantizedExperts(weights, bias)
        return DeviceExperts(pack_experts_for_device(weights, self.device), bias)

    def embedding(self, source: Source, *, is_head: bool) -> Embedding:
        """An embedding; `is_head` if it is also the output matrix."""
        quantized = self.read_quantized(source.names[0], source.cut(0))
        if quantized is not None and self.are_packed:
            return QuantizedEmbedding(quantized)
        if quantized is not None:
            return DeviceEmbedding(pack_for_device(quantized, self.device), self.dtype)
        return PlainEmbedding((self._matrix if is_head else self.tensor)(source))

    def _product(
        self,
        weight: Source,
        alike: Sequence[int],
        parts: Sequence[QuantizedWeight | None],
        orders: Sequence[Tensor | None],
        bias: Tensor | None,
    ) -> Linear:
        """The product of consecutive tensors that are quantized alike, or of a single one that is not quantized."""
        quantized = [_ordered(part, orders[i]) for i in alike if (part := parts[i]) is not None]
        whole = joined(quantized) if quantized else None
        if whole is not None and self.are_packed:
            return QuantizedLinear(whole, bias)
        if whole is not None:
            return DeviceLinear(pack_for_device(whole, self.device), bias)
        (i,) = alike
        order = orders[i]
        its = weight._replace(
            names=weight.names[i : i + 1],
            shapes=weight.shapes[i : i + 1],
            cuts=weight.cuts[i : i + 1],
            order=None if order is None else tuple(order.tolist()),
        )
        return PlainLinear(self._matrix(its), bias)

    def _quantized_experts(self, source: Source) -> tuple[QuantizedWeight, ...] | None:
        """Each expert's weight; None unless all are quantized in the same way."""
        parts = self._quantized_parts(source)
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return None
        if not source.num_stacked:
            experts = [found[0].of_expert(expert) for expert in range(found[0].codes.shape[0])]
        else:
            each = len(found) // source.num_stacked
            both = [joined(found[i : i + each]) for i in range(0, len(found), each)]
            experts = [expert for expert in both if expert is not None]
            if len(experts) < len(both):
                return None
        if not all(are_alike(experts[0], expert) for expert in experts):
            return None
        order = None if source.order is None else torch.tensor(source.order)
        return tuple(_ordered(expert, order) for expert in experts)

    def _bias(self, source: LinearSource) -> Tensor | None:
        return None if source.bias is None else self.tensor(source.bias)

    def _matrix(self, source: Source) -> Tensor:
        is_stored_so = len(source.names) == 1 and not source.is_transposed and source.order is None
        if self.are_packed and is_stored_so and self.read_quantized(source.names[0], source.cut(0)) is None:
            return self._stored(source, 0).to(self.device, self.dtype)
        return self.tensor(source)

    def _quantized_parts(self, source: Source) -> list[QuantizedWeight | None]:
        return [self.read_quantized(name, source.cut(i)) for i, name in enumerate(source.names)]

    def _stored(self, source: Source, i: int) -> Tensor:
        """The part of tensor `i` that is read, as it is stored."""
        return self.read(source.names[i], source.stored_ranges(i))


def _num_outputs(weight: Source, i: int) -> int:
    return weight.part_shape(i)[-1 if weight.is_transposed else -2]


def _runs(parts: Sequence[QuantizedWeight | None]) -> list[list[int]]:
    """Indices of consecutive parts that can be joined to one matrix."""
    runs = [[0]]
    for i, part in enumerate(parts[1:], 1):
        before = parts[i - 1]
        if part is not None and before is not None and are_alike(before, part):
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def _orders(weight: Source) -> list[Tensor | None] | None:
    """The order of each tensor's own outputs; None if outputs of several tensors are mixed."""
    if weight.order is None:
        return [None] * len(weight.names)
    orders: list[Tensor | None] = []
    first = 0
    for i in range(len(weight.names)):
        size = _num_outputs(weight, i)
        its = torch.tensor(weight.order[first : first + size]) - first
        if int(its.min()) < 0 or int(its.max()) >= size:
            return None
        orders.append(its)
        first += size
    return orders


def _ordered(weight: QuantizedWeight, order: Tensor | None) -> QuantizedWeight:
    return weight if order is None else weight.of_outputs(order)
