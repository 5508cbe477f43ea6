"""Mixtures of experts as transformers computes them, and the same weights in Penstock's block."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import transformers
from torch import Tensor, nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeSparseMoeBlock
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeMoE
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2SparseMoeBlock
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from penstock.gpu_worker.models.blocks.experts import ExpertsBlock
from penstock.gpu_worker.models.blocks.mlp import MLPBlock
from penstock.gpu_worker.models.linear import PlainExperts, PlainLinear
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.models.description.decoder import DenseMLP, Experts, Router

E, H, I = 16, 32, 24  # noqa: E741
STEP = cast(ForwardInputs, None)  # plain weights do not look at it


class Case(NamedTuple):
    module: Callable[[Any], nn.Module]
    config: Any
    experts: Experts


CASES = {
    "Mixtral": Case(
        MixtralSparseMoeBlock,
        transformers.MixtralConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=2),
        Experts(count=E, size=I, router=Router(top_k=2, renormalize=True)),
    ),
    "Qwen2-MoE": Case(
        Qwen2MoeSparseMoeBlock,
        transformers.Qwen2MoeConfig(
            hidden_size=H, moe_intermediate_size=I, shared_expert_intermediate_size=40, num_experts=E,
            num_experts_per_tok=4, hidden_act="gelu_pytorch_tanh",
        ),
        Experts(
            count=E, size=I, router=Router(top_k=4), activation="gelu_tanh",
            shared=DenseMLP(size=40, activation="gelu_tanh"), shared_is_gated=True,
        ),
    ),
    "Qwen3-MoE": Case(
        Qwen3MoeSparseMoeBlock,
        transformers.Qwen3MoeConfig(
            hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=8, norm_topk_prob=True
        ),
        Experts(count=E, size=I, router=Router(top_k=8, renormalize=True)),
    ),
    "gpt-oss": Case(
        GptOssMLP,
        transformers.GptOssConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=4),
        Experts(
            count=E, size=I, router=Router(kind="top_softmax", top_k=4, has_bias=True), activation="clamped_swiglu",
            has_bias=True,
        ),
    ),
    "GraniteMoe": Case(
        GraniteMoeMoE,
        transformers.GraniteMoeConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=4),
        Experts(count=E, size=I, router=Router(kind="top_softmax", top_k=4)),
    ),
    "DeepSeek-V2": Case(
        DeepseekV2Moe,
        transformers.DeepseekV2Config(
            hidden_size=H, moe_intermediate_size=I, n_routed_experts=E, num_experts_per_tok=3, n_shared_experts=2,
            topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0,
        ),
        Experts(
            count=E, size=I, shared=DenseMLP(size=2 * I),
            router=Router(top_k=3, num_groups=4, top_groups=2, group_judge="max", scale=16.0),
        ),
    ),
    "DeepSeek-V3": Case(
        DeepseekV3MoE,
        transformers.DeepseekV3Config(
            hidden_size=H, moe_intermediate_size=I, n_routed_experts=E, num_experts_per_tok=4, n_group=4, topk_group=2
        ),
        Experts(
            count=E, size=I, shared=DenseMLP(size=I),
            router=Router(
                kind="sigmoid", top_k=4, renormalize=True, renormalize_eps=1e-20, has_correction=True, num_groups=4,
                top_groups=2, scale=2.5,
            ),
        ),
    ),
    "GLM-4.5": Case(
        Glm4MoeMoE,
        transformers.Glm4MoeConfig(
            hidden_size=H, moe_intermediate_size=I, n_routed_experts=E, num_experts_per_tok=4, n_shared_experts=1
        ),
        Experts(
            count=E, size=I, shared=DenseMLP(size=I),
            router=Router(kind="sigmoid", top_k=4, renormalize=True, renormalize_eps=1e-20, has_correction=True),
        ),
    ),
    "Ernie 4.5": Case(
        Ernie4_5_MoeSparseMoeBlock,
        transformers.Ernie4_5_MoeConfig(
            hidden_size=H, moe_intermediate_size=I, moe_num_experts=E, moe_k=6, moe_num_shared_experts=2
        ),
        Experts(
            count=E, size=I, shared=DenseMLP(size=2 * I),
            router=Router(top_k=6, renormalize=True, has_correction=True),
        ),
    ),
    "MiniMax-M2": Case(
        MiniMaxM2SparseMoeBlock,
        transformers.MiniMaxM2Config(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=8),
        Experts(
            count=E, size=I, router=Router(kind="sigmoid", top_k=8, renormalize=True, has_correction=True)
        ),
    ),
    "Llama 4": Case(
        Llama4TextMoe,
        transformers.Llama4TextConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=1),
        Experts(
            count=E, size=I, shared=DenseMLP(size=I), router=Router(kind="sigmoid", top_k=1, multiplies_input=True)
        ),
    ),
    "Nemotron-H": Case(
        NemotronHMoE,
        transformers.NemotronHConfig(
            hidden_size=H, moe_intermediate_size=I, moe_shared_expert_intermediate_size=40, n_routed_experts=E,
            num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5, layers_block_type=["moe"],
        ),
        Experts(
            count=E, size=I, activation="relu2", is_gated=False,
            shared=DenseMLP(size=40, activation="relu2", is_gated=False),
            router=Router(
                kind="sigmoid", top_k=4, renormalize=True, renormalize_eps=1e-20, has_correction=True, num_groups=4,
                top_groups=2, scale=2.5,
            ),
        ),
    ),
}  # fmt: skip


def module_of(case: Case) -> nn.Module:
    """With random weights, of a size at which outputs are about one."""
    module = case.module(case.config).float().requires_grad_(False)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.normal_(std=(1.0 if tensor.ndim == 1 else H**-0.5))
    return module


def named_by_role(module: nn.Module) -> dict[str, Tensor]:
    """Its weights: router, router bias, correction, gate_up, down, gate_up bias, down bias, shared parts."""
    roles = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        last = name.removesuffix(".weight").removesuffix("_proj").split(".")[-1]
        if "shared_expert." in name or "shared_experts." in name:
            roles[f"shared {last}"] = tensor
        elif "correction" in name:
            roles["correction"] = tensor.flatten()
        elif name in ("gate.weight", "router.weight"):
            roles["router"] = tensor
        elif name == "router.bias":
            roles["router bias"] = tensor
        else:
            roles[last.replace("_proj_bias", " bias")] = tensor
    return roles


def block_of(case: Case, module: nn.Module, dtype: torch.dtype = torch.float32) -> ExpertsBlock:
    """The same weights in Penstock's block."""
    its = named_by_role(module)
    gate_up, down = its.pop("gate_up" if case.experts.is_gated else "up"), its.pop("down")
    biases = its.pop("gate_up bias", None), its.pop("down bias", None)
    if case.module in (GptOssMLP, Llama4TextMoe):  # stored transposed
        gate_up, down = gate_up.mT, down.mT
    if case.module is GptOssMLP:  # gates and ups alternate
        gate_up = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), dim=1)
        assert biases[0] is not None
        biases = torch.cat((biases[0][:, ::2], biases[0][:, 1::2]), dim=1), biases[1]

    def made(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(dtype).contiguous()

    def linear(weight: Tensor) -> PlainLinear:
        return PlainLinear(weight.to(dtype))

    shared = None
    if case.experts.shared is not None:
        kinds = ("gate", "up") if case.experts.shared.is_gated else ("up",)
        parts = torch.cat([its.pop(f"shared {kind}") for kind in kinds])
        shared = MLPBlock(case.experts.shared, linear(parts), linear(its.pop("shared down")))
    shared_gate = its.pop("shared_expert_gate", None)
    router_bias, correction = its.pop("router bias", None), its.pop("correction", None)
    block = ExpertsBlock(
        case.experts,
        PlainLinear(its.pop("router"), router_bias),
        correction,
        PlainExperts(gate_up.to(dtype).contiguous(), made(biases[0])),
        PlainExperts(down.to(dtype).contiguous(), made(biases[1])),
        shared,
        None if shared_gate is None else linear(shared_gate),
    )
    assert not its, f"not used: {its.keys()}"
    router = case.experts.router
    assert (router_bias is not None, correction is not None) == (router.has_bias, router.has_correction)
    assert (biases[0] is not None, shared_gate is not None) == (case.experts.has_bias, case.experts.shared_is_gated)
    return block


def computed_by(module: nn.Module, x: Tensor) -> Tensor:
    answer = module(x[None])
    out: Tensor = answer[0] if isinstance(answer, tuple) else answer
    return out.view(x.shape)
