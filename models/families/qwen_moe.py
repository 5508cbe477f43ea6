"""Qwen2-MoE (with a gated shared expert), Qwen3-MoE (with q and k norms), and the latter inside of Qwen3-VL-MoE.

Experts are in all layers, or in some.
"""

from typing import NamedTuple

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Experts, Layer, Norm, Router
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope

_NAMES = Names(
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
)


class _Variant(NamedTuple):
    """How the two differ, and transformers' defaults for fields missing in config.json."""

    num_kv_heads: int
    num_experts: int
    expert_size: int
    top_k: int
    is_second: bool  # Qwen2-MoE: a shared expert, biases of q, k and v, no q and k norms, windows in some layers
    renormalizes: bool = False


_VARIANTS = {
    "Qwen2MoeForCausalLM": _Variant(16, 60, 1408, 4, True),
    "Qwen3MoeForCausalLM": _Variant(4, 128, 768, 8, False),
    "Qwen3VLMoeTextModel": _Variant(16, 60, 1408, 4, False, True),
}


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """As `Family.parse`."""
    variant = _VARIANTS[architecture]
    attention = decoders.attention(fields, variant.num_kv_heads)
    rope, max_model_len = parse_rope(fields, fields.whole("max_position_embeddings", 32768), attention.head_dim)
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-6))
    activation = decoders.activation(fields)
    dense = DenseMLP(size=fields.whole("intermediate_size"), activation=activation)
    shared = DenseMLP(size=fields.whole("shared_expert_intermediate_size", 5632), activation=activation)
    experts = Experts(
        count=fields.whole("num_experts", fields.whole("num_local_experts", variant.num_experts)),
        size=fields.whole("moe_intermediate_size", variant.expert_size),
        router=Router(
            kind="softmax",
            top_k=fields.whole("num_experts_per_tok", variant.top_k),
            renormalize=fields.flag("norm_topk_prob", variant.renormalizes),
        ),
        activation=activation,
        shared=shared if variant.is_second else None,
        shared_is_gated=variant.is_second,
    )
    only_dense, every = fields.wholes("mlp_only_layers"), fields.whole("decoder_sparse_step", 1)

    has_bias = fields.flag("qkv_bias", True) if variant.is_second else fields.flag("attention_bias")
    qk_norm = None if variant.is_second else norm
    o_bias = has_bias and not variant.is_second
    mixer = replace(attention, qkv_bias=has_bias, o_bias=o_bias, q_norm=qk_norm, k_norm=qk_norm, rope=rope)

    def layer(number: int, window: int | None) -> Layer:
        is_sparse = number not in only_dense and (number + 1) % every == 0
        mlp = experts if is_sparse else dense
        return Layer(mixer_norm=norm, mixer=replace(mixer, window=window), mlp_norm=norm, mlp=mlp)

    windows = _windows(fields, decoders.num_layers(fields), variant)
    layers = [layer(i, window) for i, window in enumerate(windows)]
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, _NAMES)


def _windows(fields: JsonFields, num_layers: int, variant: _Variant) -> tuple[int | None, ...]:
    """Return each layer's window: Qwen3-MoE has one for all, Qwen2-MoE one for every second of the first layers."""
    if not fields.flag("use_sliding_window"):
        return (None,) * num_layers
    if not variant.is_second:
        return (fields.whole("sliding_window", 4096),) * num_layers
    last = fields.whole("max_window_layers", 28, least=0)
    usual = ["sliding_attention" if i % 2 == 0 and i < last else "full_attention" for i in range(num_layers)]
    return decoders.windows(fields, num_layers, usual, 4096)


QWEN_MOE = decoders.decoder_family(tuple(_VARIANTS), parse)
