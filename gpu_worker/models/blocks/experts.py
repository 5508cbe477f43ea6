"""The mixture of experts."""

from typing import NamedTuple

from torch import Tensor

from penstock.core.checkpoint.decoder import Experts, Router
from penstock.gpu_worker.models.blocks.mlp import MLPBlock
from penstock.gpu_worker.models.linear import ExpertLinear, Linear
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.kernels.activation import gated_activation
from penstock.kernels.experts import group_rows, sum_of_experts
from penstock.kernels.routing import Routing, route


class ExpertsBlock(NamedTuple):
    """See `Experts` (E their number, I the size of each)."""

    experts: Experts
    router: Linear  # [E, H], in fp32
    correction: Tensor | None  # fp32[E]
    gate_up: ExpertLinear  # [E, 2 * I, H]: gate, then up
    down: ExpertLinear  # [E, H, I]
    shared: MLPBlock | None = None
    shared_gate: Linear | None = None  # [1, H]

    def __call__(self, x: Tensor, inputs: ForwardInputs) -> Tensor:
        """[T, H] -> [T, H]"""
        router = self.experts.router
        ids, weights = route(self.router(x.float(), inputs), routing_of(router), self.correction)
        grouped = group_rows(ids, self.experts.count)
        of_inputs, of_outputs = (weights, None) if router.multiplies_input else (None, weights)
        gate_up = self.gate_up.of_tokens(x, grouped, inputs, of_inputs)
        rows = self.down.of_rows(gated_activation(gate_up, self.experts.activation), grouped, inputs)
        out = sum_of_experts(rows, grouped, of_outputs)
        if self.shared is None:
            return out
        shared = self.shared(x, inputs)
        if self.shared_gate is not None:
            shared *= self.shared_gate(x, inputs).sigmoid_()
        return out.add_(shared)


def routing_of(router: Router) -> Routing:
    """What the kernel must know of a router; the rest of it is the block's."""
    return Routing(
        top_k=router.top_k,
        kind=router.kind,
        renormalize=router.renormalize,
        renormalize_eps=router.renormalize_eps,
        num_groups=router.num_groups,
        top_groups=router.top_groups,
        group_judge=router.group_judge,
        scale=router.scale,
    )
