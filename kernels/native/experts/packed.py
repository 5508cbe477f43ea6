"""The Python side of a mixture of experts (`experts.h`)."""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from typing import TYPE_CHECKING

from torch import Tensor

from penstock.kernels.experts.routing import Routing
from penstock.kernels.native.library import LinearStruct, PackedLinear, address_of

if TYPE_CHECKING:
    from penstock.kernels.experts.held_experts import HeldExperts

ROUTING_KINDS = ("softmax", "sigmoid", "top_softmax")  # as enum RoutingKind in routing.h


class RoutingStruct(ctypes.Structure):
    """As Routing in routing.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("correction", "expert_scales")),
        *((name, c_int32) for name in ("num_experts", "top_k", "kind", "num_groups", "top_groups")),
        *((name, c_int32) for name in ("judges_by_two", "renormalizes")),
        ("renormalize_eps", c_float),
        ("scale", c_float),
    )


class HeldStruct(ctypes.Structure):
    """As HeldExperts in experts.h."""

    _fields_ = (*((name, c_void_p) for name in ("numbers", "copies", "num_copies", "tokens")), ("count", c_int32))


class ExpertsStruct(ctypes.Structure):
    """As Experts in experts.h."""

    _fields_ = (
        ("router", LinearStruct),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("routing", RoutingStruct),
        ("held", c_void_p),
        ("activation", c_int32),
        ("multiplies_input", c_int32),
        ("is_gated", c_int32),
    )


def routing_struct(
    routing: Routing, num_experts: int, correction: Tensor | None, expert_scales: Tensor | None = None
) -> RoutingStruct:
    """Points to `correction` and `expert_scales` (fp32 [num_experts]), which must outlive it."""
    return RoutingStruct(
        correction=address_of(correction),
        expert_scales=address_of(expert_scales),
        num_experts=num_experts,
        top_k=routing.top_k,
        kind=ROUTING_KINDS.index(routing.kind),
        num_groups=routing.num_groups,
        top_groups=routing.top_groups,
        judges_by_two=routing.group_judge == "top2",
        renormalizes=routing.renormalize,
        renormalize_eps=routing.renormalize_eps,
        scale=routing.scale,
    )


def held_struct(held: "HeldExperts") -> HeldStruct:
    """Points to the tensors of `held`, which must outlive it."""
    tensors = (held.numbers, held.copies, held.num_copies, held.tokens)
    return HeldStruct(*map(address_of, tensors), held.num_held)


class PackedExperts:
    """A mixture's weights, ready for the kernels. `struct` points into this object, which must outlive it."""

    def __init__(
        self,
        router: PackedLinear,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        routing: Routing,
        correction: Tensor | None,
        activation: int,
        *,
        is_gated: bool = True,
        expert_scales: Tensor | None = None,
        multiplies_input: bool = False,
        held: "HeldExperts | None" = None,
    ) -> None:
        """
        Args:
            router: [E, H]; its inputs are not rounded.
            gate_up: the weight of each held expert, all of one kind; interleaved if they are gated.
            down: the weight of each held expert.
            routing: how experts are chosen.
            correction: fp32 [E] or None, as for `route`.
            activation: as enum Activation in activations.h.
            is_gated: whether gates multiply the up projection.
            expert_scales: fp32 [E] or None; factors of the experts' weights.
            multiplies_input: an expert's input is multiplied by its weight, instead of its output.
            held: which experts these are; None: all. Their tokens are counted in it.
        """
        if router.kind in ("bf16_pairs", "quantized_int8", "quantized_bf16"):
            raise ValueError("the choice of experts needs logits of inputs that are not rounded")
        self._layers = [(LinearStruct * len(layers))(*(layer.struct for layer in layers)) for layers in (gate_up, down)]
        self._held = None if held is None else held_struct(held)
        self._alive = (router, list(gate_up), list(down), correction, expert_scales, held)
        self.struct = ExpertsStruct(
            router.struct,
            *(ctypes.addressof(layers) for layers in self._layers),
            routing_struct(routing, router.num_outputs, correction, expert_scales),
            None if self._held is None else ctypes.addressof(self._held),
            activation,
            multiplies_input,
            is_gated,
        )
