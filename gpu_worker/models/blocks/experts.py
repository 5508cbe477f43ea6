"""The mixture of experts."""

from typing import NamedTuple

from torch import Tensor

from penstock.gpu_worker.models.blocks.mlp import MLPBlock
from penstock.gpu_worker.models.linear import ExpertLinear, Linear, PlainLinear
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.gpu_worker.parallel.alone import ALONE
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.kernels.activation import Activation
from penstock.kernels.experts.experts import group_rows, sum_of_experts
from penstock.kernels.experts.held_experts import HeldExperts
from penstock.kernels.experts.routing import Routing, route, router_logits
from penstock.kernels.norms import NormWeights, norm
from penstock.models.description.decoder import Experts, Router


class ExpertsBlock(NamedTuple):
    """See `Experts` (E is their number, I the size of each)."""

    experts: Experts
    router: PlainLinear  # [E, H], in fp32
    correction: Tensor | None  # fp32[E]
    gate_up: ExpertLinear  # [E, 2 * I, H]: gate, then up; [E, I, H] if they are not gated
    down: ExpertLinear  # [E, H, I]
    shared: MLPBlock | None = None
    shared_gate: Linear | None = None  # [1, H]
    expert_scales: Tensor | None = None  # fp32[E]
    held: HeldExperts | None = None  # the experts in `gate_up` and `down`, if other ranks have the others

    def __call__(self, x: Tensor, inputs: ForwardInputs, judged: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H]; this rank's summand, if there are several. The router's input is `judged`, or else `x`."""
        ids, weights = self.choose(x if judged is None else judged)
        if self.held is not None:
            # Of these models only decodes are captured (`can_mix`): their padding is at position 0.
            are_real = inputs.positions > 0 if inputs.host_lens is None else None
            ids = self.held.counted(ids, turns_of(inputs), are_real)
        out = self.mix(x, ids, weights, inputs)
        return out if self.shared is None else out.add_(self.of_shared(self.shared, x, inputs))

    def choose(self, judged: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] -> the tokens' experts, int32[T, k], and their weights, fp32[T, k]."""
        logits = router_logits(judged, self.router.weight, self.router.bias)
        ids, weights = route(logits, routing_of(self.experts.router), self.correction)
        if self.expert_scales is not None:
            weights *= self.expert_scales[ids]
        return ids, weights

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor, inputs: ForwardInputs) -> Tensor:
        """[T, H] -> [T, H], the weighted sum of each token's experts; `ids` are numbers of held experts."""
        are_some, multiplies_input = self.held is not None, self.experts.router.multiplies_input
        grouped = group_rows(ids, self.experts.count if self.held is None else self.held.num_held, are_some=are_some)
        of_inputs, of_outputs = (weights, None) if multiplies_input else (None, weights)
        gate_up = self.gate_up.of_tokens(x, grouped, inputs, of_inputs)
        rows = self.down.of_activation(
            gate_up, Activation(self.experts.activation, self.experts.is_gated), grouped, inputs
        )
        return sum_of_experts(rows, grouped, of_outputs)

    def of_shared(self, shared: MLPBlock, x: Tensor, inputs: ForwardInputs) -> Tensor:
        """[T, H] -> [T, H], the shared expert, which all tokens go through."""
        out = shared(x, inputs)
        return out if self.shared_gate is None else out.mul_(self.shared_gate(x, inputs).sigmoid_())


def turns_of(inputs: ForwardInputs) -> Tensor:
    """int64[T]: see `HeldExperts`."""
    return inputs.positions + inputs.input_ids


def routing_of(router: Router) -> Routing:
    """The options of a router that the kernel needs; the block applies the others."""
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


class BesideBlock(NamedTuple):
    """See `BesideMLP`."""

    experts: ExpertsBlock
    router_norm: NormWeights  # its weight is the scale of the router's input, in fp32
    norm: NormWeights
    post: NormWeights
    mlp_post: NormWeights
    ranks: Ranks = ALONE

    def __call__(self, residual: Tensor, of_mlp: Tensor, inputs: ForwardInputs) -> Tensor:
        """From the residual stream before the MLP and the MLP's output to the sum of MLP and experts, [T, H]."""
        judged = norm(residual, self.router_norm)
        of_experts = self.ranks.all_reduce(self.experts(norm(residual, self.norm), inputs, judged))
        mixed = norm(of_experts, self.post)
        return mixed.add_(norm(of_mlp, self.mlp_post))
