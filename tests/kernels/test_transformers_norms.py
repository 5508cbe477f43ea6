"""Norms, activations and what positions do to queries, against transformers' modules."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.stablelm.modeling_stablelm import StableLmLayerNormPerHead

from penstock.kernels.activation import ActivationKind, activation, gated_activation
from penstock.kernels.attention.qk_norm_rope_write import query_growth
from penstock.kernels.norms import NormWeights, norm_cpu

WIDTH, HEADS, EPS = 48, 3, 1e-5
ALIKE: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor, Tensor], NormWeights]]] = {
    "qwen3": (lambda: Qwen3RMSNorm(WIDTH, EPS), lambda w, _: NormWeights(w, EPS)),
    "gemma3": (lambda: Gemma3RMSNorm(WIDTH, EPS), lambda w, _: NormWeights(w.float() + 1, EPS)),
    "olmo2": (lambda: Olmo2RMSNorm(WIDTH, EPS), lambda w, _: NormWeights(w.float(), EPS)),
    "gpt-oss": (lambda: GptOssRMSNorm(WIDTH, EPS), lambda w, _: NormWeights(w.float(), EPS)),
    "llama4": (lambda: Llama4TextL2Norm(EPS), lambda _, __: NormWeights(None, EPS)),
    "olmo": (lambda: OlmoLayerNorm(WIDTH), lambda _, __: NormWeights(None, EPS, "layer")),
    "cohere": (lambda: CohereLayerNorm(WIDTH, EPS), lambda w, _: NormWeights(w, EPS, "layer")),
    "cohere's heads": (lambda: CohereLayerNorm((HEADS, WIDTH), EPS), lambda w, _: NormWeights(w, EPS, "layer")),
    "nemotron": (lambda: NemotronLayerNorm1P(WIDTH, EPS), lambda w, b: NormWeights(w + 1, EPS, "layer", b)),
    "phi": (lambda: nn.LayerNorm(WIDTH, EPS), lambda w, b: NormWeights(w, EPS, "layer", b)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALIKE)
def test_norms(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, weights = ALIKE[name]
    module = make().to(dtype)
    for parameter in module.parameters():
        parameter.data.normal_()
    x = 3 * torch.randn(5, HEADS, WIDTH).to(dtype)
    none = torch.empty(0)
    with torch.no_grad():
        held = weights(getattr(module, "weight", none), getattr(module, "bias", none))
        got, expected = norm_cpu(x, held), module(x)
    # In bf16 the values may fall on either side of a rounding.
    torch.testing.assert_close(got, expected, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-5)


def test_norms_of_stablelms_heads() -> None:
    torch.manual_seed(0)
    module = StableLmLayerNormPerHead(WIDTH, HEADS, eps=EPS)
    for parameter in module.parameters():
        parameter.data.normal_()
    x = torch.randn(5, HEADS, WIDTH)
    weight = torch.stack([parameter.data for parameter in module.parameters()])
    expected = module(x.transpose(0, 1)[None])[0].transpose(0, 1)  # [batch, heads, tokens, D]
    torch.testing.assert_close(norm_cpu(x, NormWeights(weight, EPS, "layer")), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "name"), [
    ("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("relu", "relu"), ("relu2", "relu2"),
])  # fmt: skip
def test_activations(kind: ActivationKind, name: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-8, 8, 200).view(2, 100).to(dtype)
    assert torch.equal(activation(x, kind), ACT2FN[name](x))


def test_the_gate_of_gpt_oss() -> None:
    """Its gates and ups alternate."""
    torch.manual_seed(0)
    gate_up = 6 * torch.randn(4, 60)
    expected = vars(GptOssExperts)["_apply_gate"](SimpleNamespace(limit=7.0, alpha=1.702), gate_up)
    halves = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), dim=1)
    torch.testing.assert_close(gated_activation(halves, "clamped_swiglu"), expected)


def test_query_growth() -> None:
    positions = torch.tensor([0, 1, 16383, 16384, 50000])
    expected = get_llama_4_attn_scale(positions[None], 0.1, 16384).flatten()
    torch.testing.assert_close(query_growth(positions, 0.1, 16384.0), expected)
