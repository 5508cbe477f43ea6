"""The choice of experts against its plain reference, and against the routers of transformers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from penstock.kernels.experts.routing import Routing, route, route_reference
from tests.kernels.routings import ROUTINGS

E, H, T = 24, 32, 50


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Case(NamedTuple):
    router: Callable[[Any], torch.nn.Module]
    config: Any
    routing: Routing
    correction: str = ""  # the name of its buffer


CASES = {
    "Mixtral": Case(
        MixtralTopKRouter,
        transformers.MixtralConfig(hidden_size=H, num_local_experts=E, num_experts_per_tok=2),
        Routing(top_k=2, renormalize=True),
    ),
    "Qwen2-MoE": Case(
        Qwen2MoeTopKRouter,
        transformers.Qwen2MoeConfig(hidden_size=H, num_experts=E, num_experts_per_tok=4),
        Routing(top_k=4),
    ),
    "Qwen3-MoE": Case(
        Qwen3MoeTopKRouter,
        transformers.Qwen3MoeConfig(hidden_size=H, num_experts=E, num_experts_per_tok=8, norm_topk_prob=True),
        Routing(top_k=8, renormalize=True),
    ),
    "gpt-oss": Case(
        GptOssTopKRouter,
        transformers.GptOssConfig(hidden_size=H, num_local_experts=E, num_experts_per_tok=4),
        Routing(top_k=4, kind="top_softmax"),
    ),
    "GraniteMoe": Case(
        GraniteMoeTopKRouter,
        transformers.GraniteMoeConfig(hidden_size=H, num_local_experts=E, num_experts_per_tok=8),
        Routing(top_k=8, kind="top_softmax"),
    ),
    "DeepSeek-V2-Lite": Case(
        DeepseekV2TopkRouter,
        transformers.DeepseekV2Config(hidden_size=H, n_routed_experts=E, num_experts_per_tok=6),
        Routing(top_k=6),
    ),
    "DeepSeek-V2": Case(
        DeepseekV2TopkRouter,
        transformers.DeepseekV2Config(
            hidden_size=H, n_routed_experts=E, num_experts_per_tok=6, topk_method="group_limited_greedy", n_group=8,
            topk_group=3, routed_scaling_factor=16.0,
        ),
        Routing(top_k=6, num_groups=8, top_groups=3, group_judge="max", scale=16.0),
    ),
    "DeepSeek-V3": Case(
        DeepseekV3TopkRouter,
        transformers.DeepseekV3Config(
            hidden_size=H, n_routed_experts=E, num_experts_per_tok=8, n_group=4, topk_group=2
        ),
        Routing(
            top_k=8, kind="sigmoid", renormalize=True, renormalize_eps=1e-20, num_groups=4, top_groups=2, scale=2.5
        ),
        "e_score_correction_bias",
    ),
    "GLM-4.5": Case(
        Glm4MoeTopkRouter,
        transformers.Glm4MoeConfig(hidden_size=H, n_routed_experts=E, num_experts_per_tok=8),
        Routing(top_k=8, kind="sigmoid", renormalize=True, renormalize_eps=1e-20),
        "e_score_correction_bias",
    ),
    "Ernie 4.5": Case(
        Ernie4_5_MoeTopKRouter,
        transformers.Ernie4_5_MoeConfig(hidden_size=H, moe_num_experts=E, moe_k=6),
        Routing(top_k=6, renormalize=True),
        "moe_statics.e_score_correction_bias",
    ),
    "MiniMax-M2": Case(
        MiniMaxM2TopKRouter,
        transformers.MiniMaxM2Config(hidden_size=H, num_local_experts=E, num_experts_per_tok=8),
        Routing(top_k=8, kind="sigmoid", renormalize=True),
        "argument",
    ),
    "Llama 4": Case(
        Llama4Router,
        transformers.Llama4TextConfig(hidden_size=H, num_local_experts=E, num_experts_per_tok=1),
        Routing(top_k=1, kind="sigmoid"),
    ),
}  # fmt: skip


def dense(ids: Tensor, weights: Tensor) -> Tensor:
    """[T, E]: each expert's weight, whatever the order of the choice."""
    return torch.zeros(len(ids), E).scatter_(1, ids.long(), weights)


@pytest.mark.parametrize("name", CASES)
def test_transformers_routers(name: str) -> None:
    case = CASES[name]
    router = case.router(case.config).float().requires_grad_(False)
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.normal_()
    x = torch.randn(T, H)
    arguments: tuple[Tensor, ...] = ()
    correction = None
    if case.correction == "argument":
        correction = torch.randn(E)
        arguments = (correction,)
    elif case.correction:
        correction = dict((*router.named_buffers(), *router.named_parameters()))[case.correction].flatten()
    answer = router(x, *arguments)
    logits = functional.linear(x, router.get_parameter("weight"), getattr(router, "bias", None))
    ids, weights = route(logits, case.routing, correction)
    expected = answer[0] if name == "Llama 4" else dense(answer[2], answer[1])
    torch.testing.assert_close(dense(ids, weights), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_reference(name: str, num_tokens: int) -> None:
    logits = 3 * torch.randn(num_tokens, 12)
    correction = torch.randn(12) if "corrected" in name else None
    ids, weights = route(logits, ROUTINGS[name], correction)
    expected_ids, expected = route_reference(logits, ROUTINGS[name], correction)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ROUTINGS)
def test_of_equals_the_lowest_comes_first(name: str) -> None:
    logits = torch.randint(-1, 2, (200, 12)).float()
    correction = torch.randint(0, 2, (12,)).float() if "corrected" in name else None
    ids, _ = route(logits, ROUTINGS[name], correction)
    assert torch.equal(ids, route_reference(logits, ROUTINGS[name], correction)[0])


def test_saturated_scores_do_not_make_equals() -> None:
    """The sigmoid of both is 1 in fp32."""
    ids, weights = route(torch.tensor([[0.0, 40.0, 41.0]]), Routing(top_k=1, kind="sigmoid"))
    assert (ids.item(), weights.item()) == (2, 1.0)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_invalid_logits_disturb_no_other_token(name: str, value: float) -> None:
    correction = torch.randn(12) if "corrected" in name else None
    logits = torch.randn(3, 12)
    expected = route(logits, ROUTINGS[name], correction)
    logits[1] = value
    ids, weights = route(logits, ROUTINGS[name], correction)
    assert torch.equal(ids[::2], expected[0][::2])
    assert torch.equal(weights[::2], expected[1][::2])
    assert all(len(set(row)) == len(row) and set(row) <= set(range(12)) for row in ids.tolist())


@pytest.mark.parametrize("routing", [
    Routing(top_k=0), Routing(top_k=13), Routing(top_k=1, num_groups=5), Routing(top_k=1, num_groups=4, top_groups=5),
    Routing(top_k=4, num_groups=4), Routing(top_k=1, num_groups=12), Routing(top_k=1, num_groups=0),
])  # fmt: skip
def test_impossible_routings_are_refused(routing: Routing) -> None:
    with pytest.raises(ValueError, match="expert"):
        route(torch.zeros(1, 12), routing)


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="logits must be fp32"):
        route(torch.zeros(1, 12).bfloat16(), Routing(top_k=1))
    with pytest.raises(ValueError, match="correction must be fp32"):
        route(torch.zeros(1, 12), Routing(top_k=1), torch.zeros(11))
