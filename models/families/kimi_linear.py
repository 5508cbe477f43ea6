"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in the others; experts."""

from collections.abc import Sequence

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Decoder, DenseMLP, Experts, LatentAttention, Layer, Norm, Router
from penstock.models.description.names import Names
from penstock.models.description.recurrent import KimiDelta
from penstock.models.parsing import decoders
from penstock.models.parsing.family import NotDescribed
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.recurrent import conv_width, kinds_of_layers, needs_silu

_NAMES = Names(
    recurrent_in=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    recurrent_gates=("self_attn.f_a_proj", "self_attn.g_a_proj", "self_attn.b_proj"),
    recurrent_steps="self_attn.f_b_proj",
    recurrent_opening="self_attn.g_b_proj",
    recurrent_conv=("self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"),
    recurrent_norm="self_attn.o_norm",
    recurrent_out="self_attn.o_proj",
    a_log="self_attn.A_log",
    dt_bias="self_attn.dt_bias",
    expert_gate_up=("mlp.experts.{}.w1", "mlp.experts.{}.w3"),
    expert_down="mlp.experts.{}.w2",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    needs_silu(fields)  # of convolutions, too
    if not fields.flag("mla_use_nope", True):
        raise NotDescribed("config.json: mla_use_nope is only supported if it is true")
    num_layers, norm = decoders.num_layers(fields), Norm(eps=fields.number("rms_norm_eps", 1e-5))
    of_delta = fields.object("linear_attn_config") or JsonFields("config.json", {})
    delta = KimiDelta(
        num_heads=of_delta.whole("num_heads", fields.whole("linear_num_heads", 32)),
        head_dim=of_delta.whole("head_dim", fields.whole("linear_head_dim", 128)),
        conv_width=conv_width(of_delta, "short_conv_kernel_size", conv_width(fields, "linear_conv_kernel_dim", 4)),
        norm_eps=norm.eps,
    )
    attention = _attention(fields)
    dense, experts = DenseMLP(size=fields.whole("intermediate_size", 9216)), _experts(fields)
    layers = [
        Layer(
            mixer_norm=norm,
            mixer=attention if kind == "attention" else delta,
            mlp_norm=norm,
            mlp=dense if is_dense else experts,
        )
        for kind, is_dense in zip(_kinds(fields, of_delta, num_layers), _dense(fields, num_layers), strict=True)
    ]
    max_model_len = _whole(fields, "model_max_length", "max_position_embeddings", 1 << 20)
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, _NAMES)


def _whole(fields: JsonFields, name: str, other: str, default: int) -> int:
    """Return a field that transformers knows by two names; the first one is the published one."""
    return fields.whole(name, fields.whole(other, default))


def _attention(fields: JsonFields) -> LatentAttention:
    nope_dim, rope_dim = fields.whole("qk_nope_head_dim", 128), fields.whole("qk_rope_head_dim", 64)
    if rope_dim % 2:
        raise ConfigError(f"config.json: qk_rope_head_dim must be even, got {rope_dim}")
    return LatentAttention(
        num_heads=fields.whole("num_attention_heads", 32),
        q_rank=None if fields.raw("q_lora_rank") is None else fields.whole("q_lora_rank"),
        kv_rank=fields.whole("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=fields.whole("v_head_dim", 128),
        scale=(nope_dim + rope_dim) ** -0.5,
        rope=None,
        norm=Norm(eps=1e-6),  # whatever the other norms have
        has_bias=fields.flag("attention_bias"),
    )


def _kinds(fields: JsonFields, of_delta: JsonFields, num_layers: int) -> Sequence[str]:
    """Return "attention" or "recurrent" for each layer; published models count them from one."""
    usual = ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(num_layers)]
    if of_delta.has("full_attn_layers") and of_delta.has("kda_layers"):
        attending, scanning = ({*of_delta.wholes(name)} for name in ("full_attn_layers", "kda_layers"))
        if sorted([*attending, *scanning]) != list(range(1, num_layers + 1)):
            raise ConfigError(
                f"config.json: full_attn_layers and kda_layers must have each of 1 to {num_layers} once between them"
            )
        usual = ["full_attention" if i + 1 in attending else "linear_attention" for i in range(num_layers)]
    return kinds_of_layers(fields, num_layers, usual)


def _dense(fields: JsonFields, num_layers: int) -> list[bool]:
    """Whether each layer has a dense MLP."""
    types = fields.texts("mlp_layer_types")
    if types is None:
        if fields.whole("moe_layer_freq", 1) != 1:
            raise NotDescribed("config.json: moe_layer_freq is only supported if it is 1")
        first = fields.whole("first_k_dense_replace", 1, least=0)
        types = ["dense" if i < first else "sparse" for i in range(num_layers)]
    if len(types) != num_layers or not {*types} <= {"dense", "sparse"}:
        raise ConfigError(f"config.json: mlp_layer_types must name dense or sparse {num_layers} times")
    return [kind == "dense" for kind in types]


def _experts(fields: JsonFields) -> Experts:
    judge = fields.text("moe_router_activation_func", "sigmoid")
    if judge != "sigmoid":
        raise NotDescribed(
            f"config.json: moe_router_activation_func {judge[:64]!r} is not supported; it may be sigmoid"
        )
    size = fields.whole("moe_intermediate_size", 1024)
    return Experts(
        count=_whole(fields, "num_experts", "num_local_experts", 256),
        size=size,
        router=Router(
            kind="sigmoid",
            top_k=_whole(fields, "num_experts_per_token", "num_experts_per_tok", 8),
            renormalize=fields.flag("moe_renormalize", fields.flag("norm_topk_prob", True)),
            renormalize_eps=1e-20,
            has_correction=True,
            num_groups=_whole(fields, "num_expert_group", "n_group", 1),
            top_groups=fields.whole("topk_group", 1),
            scale=fields.number("routed_scaling_factor", 2.446),
        ),
        shared=DenseMLP(size=size * _whole(fields, "num_shared_experts", "n_shared_experts", 1)),
    )


KIMI_LINEAR = decoders.decoder_family(
    ("KimiLinearForCausalLM",), parse, renamed={".block_sparse_moe.": ".mlp.", ".forget_gate.": "."}
)
