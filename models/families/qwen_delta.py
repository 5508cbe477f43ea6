"""Qwen3-Next and Qwen3.5, dense or a mixture: the gated delta rule in most layers, gated attention in every fourth."""

from typing import NamedTuple

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Experts, Layer, Norm, Router
from penstock.models.description.names import Names
from penstock.models.description.recurrent import GatedDelta
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.recurrent import conv_width, kinds_of_layers, refuse_groups
from penstock.models.parsing.rope import parse_rope

_GROUPED = Names(
    recurrent_in=("linear_attn.in_proj_qkvz",),
    recurrent_gates=("linear_attn.in_proj_ba",),
    recurrent_conv=("linear_attn.conv1d",),
    recurrent_norm="linear_attn.norm",
    recurrent_out="linear_attn.out_proj",
    a_log="linear_attn.A_log",
    dt_bias="linear_attn.dt_bias",
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    unused=("mtp.",),
)
_APART = replace(
    _GROUPED,
    recurrent_in=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    recurrent_gates=("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
)


class _Variant(NamedTuple):
    """How the architectures differ: names, and transformers' defaults for fields missing in config.json."""

    names: Names
    num_kv_heads: int
    num_experts: int = 0  # 0: all MLPs are dense
    top_k: int = 0


_VARIANTS = {
    "Qwen3NextForCausalLM": _Variant(_GROUPED, 2, 512, 10),
    "Qwen3_5ForCausalLM": _Variant(_APART, 4),
    "Qwen3_5MoeForCausalLM": _Variant(_APART, 2, 256, 8),
}


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    num_layers, variant = decoders.num_layers(fields), _VARIANTS[architecture]
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-6), offset=1.0)
    has_bias = fields.flag("attention_bias")
    its = decoders.attention(fields, variant.num_kv_heads, head_dim=256, has_bias=has_bias)
    trained_len = fields.whole("max_position_embeddings", 32768)
    rope, max_model_len = parse_rope(fields, trained_len, its.head_dim, share=0.25)
    attention = replace(its, rope=rope, q_norm=norm, k_norm=norm, has_output_gate=True)
    delta = _delta(fields, norm.eps, is_grouped=variant.names is _GROUPED)
    dense = DenseMLP(size=fields.whole("intermediate_size", 5632), activation=decoders.activation(fields))
    experts = _experts(fields, variant) if variant.num_experts else None
    only_dense, every = fields.wholes("mlp_only_layers"), fields.whole("decoder_sparse_step", 1)

    def layer(number: int, kind: str) -> Layer:
        is_sparse = experts is not None and number not in only_dense and (number + 1) % every == 0
        return Layer(
            mixer_norm=norm,
            mixer=attention if kind == "attention" else delta,
            mlp_norm=norm,
            mlp=experts if is_sparse else dense,
        )

    interval = fields.whole("full_attention_interval", 4)
    usual = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
    layers = [layer(i, kind) for i, kind in enumerate(kinds_of_layers(fields, num_layers, usual))]
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, variant.names)


def _delta(fields: JsonFields, norm_eps: float, *, is_grouped: bool) -> GatedDelta:
    num_key_heads, num_value_heads = (
        fields.whole("linear_num_key_heads", 16), fields.whole("linear_num_value_heads", 32)
    )  # fmt: skip
    refuse_groups("linear_num_value_heads", num_value_heads, "linear_num_key_heads", num_key_heads)
    return GatedDelta(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=fields.whole("linear_key_head_dim", 128),
        value_dim=fields.whole("linear_value_head_dim", 128),
        conv_width=conv_width(fields, "linear_conv_kernel_dim", 4),
        norm_eps=norm_eps,
        is_grouped=is_grouped,
    )


def _experts(fields: JsonFields, variant: _Variant) -> Experts | None:
    count = fields.whole("num_experts", variant.num_experts, least=0)
    if not count:
        return None
    activation = decoders.activation(fields)
    return Experts(
        count=count,
        size=fields.whole("moe_intermediate_size", 512),
        router=Router(
            top_k=fields.whole("num_experts_per_tok", variant.top_k), renormalize=fields.flag("norm_topk_prob", True)
        ),
        activation=activation,
        shared=DenseMLP(size=fields.whole("shared_expert_intermediate_size", 512), activation=activation),
        shared_is_gated=True,
    )


QWEN_DELTA = decoders.decoder_family(tuple(_VARIANTS), parse)
