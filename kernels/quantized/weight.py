"""A quantized matrix, in the common form between the formats of checkpoints and the kernels.

A format turns what a file stores into a `QuantizedWeight`, one matrix at a time. Kernels pack it into the layout that
they read. So formats and kernels are independent of each other, and `dequantized` is the reference for both.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

SUPER_GROUP = 256
"""Inputs that share a super-scale."""


class InputRounding(NamedTuple):
    """How a checkpoint requires the inputs of a product to be rounded."""

    dtype: Literal["int8", "fp8_e4m3"]
    scale: Tensor | None = None
    """fp32[], the scale of every input. None: each token's own, its largest magnitude over the dtype's (127 or 448)."""
    group: int | None = None
    """Inputs of a token that share a scale; None: all."""


class QuantizedWeight(NamedTuple):
    """A matrix [N, K], with j = k // group and s = k // 256. It is computed in fp32, in this order:

        w[n, k] = scale[n, j] * (value(codes[n, k]) - zeros[n, j]) - minimum[n, j]

        value(c) = values[c] if there are values, else c
        scale[n, j] = super_scales[n, s] * scales[n, j] if there are super-scales, else scales[n, j]
        minimum[n, j] = super_minimums[n, s] * minimums[n, j] likewise; 0 if there are no minimums

    For experts, all tensors with an axis N have one more axis in front. The last group may be shorter than the others.
    """

    codes: Tensor  # uint8[N, K], all below 2**bits
    bits: int  # of a code: 2, 3, 4, 5, 6 or 8
    group: int  # consecutive inputs that share a scale
    scales: Tensor  # [N, J]: fp32, fp16 or bf16; with super-scales uint8 or int8
    zeros: Tensor | int = 0  # uint8[N, J], or the same number for all
    minimums: Tensor | None = None  # [N, J], of the dtypes of `scales`
    super_scales: Tensor | None = None  # fp16[N, ceil(K / 256)]
    super_minimums: Tensor | None = None  # the same
    values: Tensor | None = None  # fp32[2**bits]
    order: Tensor | None = None  # int64[K]: column k of the matrix takes x[order[k]]
    inputs: InputRounding | None = None  # None: kernels may round inputs as is usual for their compute dtype

    @property
    def num_outputs(self) -> int:
        """N."""
        return self.codes.shape[-2]

    @property
    def num_inputs(self) -> int:
        """K."""
        return self.codes.shape[-1]

    def of_outputs(self, chosen: Tensor | slice) -> Self:
        """The same matrix with some of the outputs, or all of them in another order."""
        return self._mapped(lambda its: its[..., chosen, :])

    def of_inputs(self, begin: int, end: int) -> Self:
        """The same matrix for some of the inputs. Groups get smaller if the inputs do not begin with a group."""
        if self.order is not None:
            raise ValueError("inputs in the order of their importance are not split")
        if end - begin == self.num_inputs:
            return self
        weight = self if begin % SUPER_GROUP == 0 or self.super_scales is None else self._without_super()
        one_group = self.scales.shape[-1] == 1
        group = end - begin if one_group else math.gcd(self.group, begin)
        changed: dict[str, Any] = {"codes": weight.codes[..., begin:end], "group": group}
        for name, its in weight.of_each_output().items():
            if name.startswith("super_"):
                changed[name] = its[..., begin // SUPER_GROUP : -(-end // SUPER_GROUP)]
            elif name != "codes" and not one_group:
                spread = its.repeat_interleave(self.group // group, dim=-1)
                changed[name] = spread[..., begin // group : -(-end // group)]
        if weight.inputs is not None and weight.inputs.group is not None:
            changed["inputs"] = weight.inputs._replace(group=math.gcd(weight.inputs.group, begin))
        return weight._replace(**changed)

    def _without_super(self) -> Self:
        """The same matrix without super-scales: its scales are the products of scales and super-scales."""
        changed: dict[str, Any] = {}
        for name in ("scales", "minimums"):
            its, of_super = getattr(self, name), getattr(self, f"super_{name}")
            if its is not None and of_super is not None:
                of_groups = of_super.float().repeat_interleave(SUPER_GROUP // self.group, dim=-1)
                changed |= {name: of_groups[..., : its.shape[-1]] * its.float(), f"super_{name}": None}
        return self._replace(**changed)

    def of_expert(self, expert: int) -> Self:
        """One expert's matrix."""
        return self._mapped(lambda its: its[expert])

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {name: change(its) for name, its in self.of_each_output().items()}
        return self._replace(**changed)

    def of_each_output(self) -> dict[str, Tensor]:
        """The tensors that have a row for each output, by their names here."""
        names = ("codes", "scales", "zeros", "minimums", "super_scales", "super_minimums")
        found = {name: getattr(self, name) for name in names}
        return {name: its for name, its in found.items() if isinstance(its, Tensor)}


def joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One matrix with the outputs of all parts, in order; None if the parts differ in more than their outputs."""
    first = parts[0]
    tensors = [part.of_each_output() for part in parts]
    if any(not are_alike(first, part) for part in parts[1:]):
        return None
    cat: dict[str, Any] = {name: torch.cat([its[name] for its in tensors], dim=-2) for name in tensors[0]}
    return first._replace(**cat)


def stacked(experts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Experts' matrices, which must be alike, stacked to one."""
    tensors = [expert.of_each_output() for expert in experts]
    stack: dict[str, Any] = {name: torch.stack([its[name] for its in tensors]) for name in tensors[0]}
    return experts[0]._replace(**stack)


def dequantized(weight: QuantizedWeight) -> Tensor:
    """fp32[N, K], its columns in the order of x: the reference for every product."""
    num_inputs = weight.num_inputs

    def spread(per_group: Tensor, size: int) -> Tensor:
        return per_group.float().repeat_interleave(size, dim=-1)[..., :num_inputs]

    def scaled(per_group: Tensor, per_super: Tensor | None) -> Tensor:
        of_groups = spread(per_group, weight.group)
        return of_groups if per_super is None else spread(per_super, SUPER_GROUP) * of_groups

    numbers = weight.codes.float() if weight.values is None else weight.values[weight.codes.int()]
    numbers = numbers - (spread(weight.zeros, weight.group) if isinstance(weight.zeros, Tensor) else weight.zeros)
    matrix = scaled(weight.scales, weight.super_scales) * numbers
    if weight.minimums is not None:
        matrix = matrix - scaled(weight.minimums, weight.super_minimums)
    if weight.order is None:
        return matrix
    ordered = torch.empty_like(matrix)
    ordered[..., weight.order] = matrix
    return ordered


def are_alike(a: QuantizedWeight, b: QuantizedWeight) -> bool:
    """Whether two matrices differ only in their numbers and in how many outputs they have."""
    return _kind(a) == _kind(b) and _same(a.values, b.values) and _same(a.order, b.order) and _same_inputs(a, b)


def _kind(weight: QuantizedWeight) -> tuple[object, ...]:
    tensors = weight.of_each_output()
    zeros = None if "zeros" in tensors else weight.zeros
    return (weight.bits, weight.group, weight.num_inputs, zeros, {name: its.dtype for name, its in tensors.items()})


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _same_inputs(a: QuantizedWeight, b: QuantizedWeight) -> bool:
    if a.inputs is None or b.inputs is None:
        return a.inputs is b.inputs
    return a.inputs._replace(scale=None) == b.inputs._replace(scale=None) and _same(a.inputs.scale, b.inputs.scale)
