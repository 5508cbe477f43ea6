"""The Python side of a mixture of experts (`experts.h`)."""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p

from torch import Tensor

from penstock.kernels.native.library import LinearStruct, PackedLinear, address_of
from penstock.kernels.routing import Routing

ROUTING_KINDS = ("softmax", "sigmoid", "top_softmax")  # as enum RoutingKind in routing.h


class RoutingStruct(ctypes.Structure):
    """As Routing in routing.h."""

    _fields_ = (
        ("correction", c_void_p),
        *((name, c_int32) for name in ("num_experts", "top_k", "kind", "num_groups", "top_groups")),
        *((name, c_int32) for name in ("judges_by_two", "renormalizes")),
        ("renormalize_eps", c_float),
        ("scale", c_float),
    )


class ExpertsStruct(ctypes.Structure):
    """As Experts in experts.h."""

    _fields_ = (
        ("router", LinearStruct),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("routing", RoutingStruct),
        ("activation", c_int32),
        ("multiplies_input", c_int32),
    )


def routing_struct(routing: Routing, num_experts: int, correction: Tensor | None) -> RoutingStruct:
    """Points to `correction` (fp32 [num_experts]), which must outlive it."""
    return RoutingStruct(
        correction=address_of(correction),
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
        multiplies_input: bool = False,
    ) -> None:
        """
        Args:
            router: [E, H]; its inputs are not rounded.
            gate_up: of each expert, interleaved; all have one kind.
            down: of each expert.
            routing: how experts are chosen.
            correction: fp32 [E] or None, as for `route`.
            activation: as enum Activation in activations.h; gated.
            multiplies_input: an expert's input is multiplied by its weight, instead of its output.
        """
        if router.kind == "bf16_pairs":
            raise ValueError("the choice of experts needs logits of inputs that are not rounded")
        self._layers = [(LinearStruct * len(layers))(*(layer.struct for layer in layers)) for layers in (gate_up, down)]
        self._alive = (router, list(gate_up), list(down), correction)
        self.struct = ExpertsStruct(
            router.struct,
            *(ctypes.addressof(layers) for layers in self._layers),
            routing_struct(routing, len(gate_up), correction),
            activation,
            multiplies_input,
        )
