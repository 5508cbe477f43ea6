"""The norms of the families with random weights, and what attention blocks do to q and k."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.attention.qk_norm_rope_write import QKNorms
from penstock.kernels.norms import NormWeights

NORMS = ("llama", "gemma", "bare", "layer", "layer without bias", "bare layer", "fp32 layer")


def norm_weights(kind: str, shape: tuple[int, ...] | int, dtype: torch.dtype, device: str = "cpu") -> NormWeights:
    """Weights for one of `NORMS`, around 1."""
    held = torch.float32 if kind in ("gemma", "fp32 layer") else dtype
    shape = (shape,) if isinstance(shape, int) else shape
    weight, bias = (1 + torch.randn(2, *shape, device=device) / 2).to(held)
    if kind == "bare":
        return NormWeights(None, 1e-5)
    if "layer" not in kind:
        return NormWeights(weight, 1e-5)
    if kind == "bare layer":
        return NormWeights(None, 1e-5, "layer")
    return NormWeights(weight, 1e-5, "layer", None if kind == "layer without bias" else bias)


class QKCase(NamedTuple):
    """An attention block's heads, and their norms: one of `NORMS`, "" for none."""

    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int = 16  # 0: nothing is rotated
    q_norm: str = ""
    k_norm: str = ""
    spans_all: bool = False
    each_head: bool = False  # a weight for each head
    follow_rope: bool = False
    grows: bool = False
    norms_v: bool = False
    dtype: torch.dtype = torch.float32


QK_CASES = [
    QKCase(),
    QKCase(rotary_dim=8),
    QKCase(q_norm="llama", k_norm="llama"),
    QKCase(rotary_dim=8, q_norm="llama", k_norm="llama"),
    QKCase(rotary_dim=0),
    QKCase(rotary_dim=0, q_norm="gemma", k_norm="gemma", grows=True),
    QKCase(7, 1, 64, 64, q_norm="llama"),
    QKCase(3, 1, 80, 80, k_norm="llama", each_head=True),
    QKCase(2, 2, 96, 48, q_norm="llama", k_norm="llama", spans_all=True),  # MiniMax-M2
    QKCase(3, 1, 64, 64, q_norm="gemma", k_norm="gemma", spans_all=True),  # OLMo 2
    QKCase(3, 1, 64, 32, q_norm="gemma", spans_all=True, follow_rope=True),
    QKCase(3, 1, 64, 64, q_norm="llama", k_norm="llama", follow_rope=True),  # Hunyuan
    QKCase(6, 2, 32, 32, q_norm="bare", k_norm="bare", follow_rope=True, grows=True),  # Llama 4
    QKCase(6, 2, 80, 20, q_norm="layer without bias", k_norm="layer without bias", each_head=True),  # StableLM
    QKCase(6, 2, 32, 32, q_norm="fp32 layer", k_norm="fp32 layer", each_head=True),
    QKCase(4, 4, 80, 32, q_norm="layer", k_norm="layer"),  # Phi
    QKCase(4, 1, 32, 8, q_norm="bare layer", k_norm="bare layer", spans_all=True, follow_rope=True),
    QKCase(2, 1, 256, 128, q_norm="gemma", k_norm="gemma"),
    QKCase(2, 1, 32, 8, q_norm="llama", k_norm="llama", norms_v=True),  # Gemma 4
    QKCase(3, 2, 80, 80, norms_v=True),
]


class QKInputs(NamedTuple):
    args: tuple[Tensor, Tensor | None, Tensor | None, QKNorms]
    q_scale: Tensor | None


def make_qk_inputs(case: QKCase, with_positions: bool, device: str = "cpu", num_tokens: int = 6) -> QKInputs:
    """Random arguments of `qk_norm_rope_write`, in its order."""

    def of_heads(kind: str, heads: int) -> NormWeights | None:
        size = heads * case.head_dim if case.spans_all else case.head_dim
        shape = (heads, size) if case.each_head else (size,)
        return norm_weights(kind, shape, case.dtype, device) if kind else None

    width = (case.num_q_heads + 2 * case.num_kv_heads) * case.head_dim
    qkv = torch.randn(num_tokens, width, device=device).to(case.dtype)
    positions = torch.tensor([3, 0, 19, 7, 7, 1], device=device)[:num_tokens] if with_positions else None
    cos_sin = torch.randn(20 if with_positions else num_tokens, case.rotary_dim, device=device)
    norms = QKNorms(
        of_heads(case.q_norm, case.num_q_heads),
        of_heads(case.k_norm, case.num_kv_heads),
        case.spans_all,
        case.follow_rope,
        NormWeights(eps=1e-3) if case.norms_v else None,
    )
    q_scale = torch.rand(num_tokens, device=device) + 1 if case.grows else None
    return QKInputs((qkv, positions, cos_sin if case.rotary_dim else None, norms), q_scale)
