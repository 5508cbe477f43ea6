"""Gemma 4 (text): heads of two sizes, values from keys, last layers that read earlier layers' keys and values.

Some models have a vector for each layer and token, others experts beside each MLP.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.config.options import ConfigError
from penstock.models.description.decoder import (
    Activation,
    Attention,
    BesideMLP,
    Decoder,
    DenseMLP,
    Experts,
    Layer,
    LayerInputs,
    Norm,
    Router,
)
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import RopeConfig, parse_rope, rope_settings

_NAMES = Names(
    post_mixer_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
    router="router.proj",
    expert_gate_up=("experts.{}.gate_proj", "experts.{}.up_proj"),
    expert_down="experts.{}.down_proj",
    experts="joined",
    beside_norm="pre_feedforward_layernorm_2",
    beside_post="post_feedforward_layernorm_2",
    beside_mlp_post="post_feedforward_layernorm_1",
)
_FULL = "full_attention"
_USUAL_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    _FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """As `Family.parse`."""
    if fields.text("use_bidirectional_attention") == "all":
        raise ConfigError("config.json: use_bidirectional_attention is not supported: tokens see only earlier ones")
    num_layers = decoders.num_layers(fields)
    types = [*decoders.layer_types(fields, num_layers, decoders.every(6, num_layers))]
    types[-1] = _FULL
    trained_len = fields.whole("max_position_embeddings", 131072)
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-6))
    activation = decoders.activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    mlp = DenseMLP(size=fields.whole("intermediate_size"), activation=activation)
    wide = replace(mlp, size=mlp.size * (1 + fields.flag("use_double_wide_mlp")))
    beside = _beside_mlp(fields, norm, activation) if fields.flag("enable_moe_block") else None

    def layer(number: int, shared: int | None) -> Layer:
        return Layer(
            mixer_norm=norm,
            mixer=replace(_attention(fields, number, types[number], norm, trained_len), shares_kv_of=shared),
            post_mixer_norm=norm,
            mlp_norm=norm,
            mlp=mlp if shared is None else wide,
            post_mlp_norm=norm,
            beside_mlp=beside,
            has_output_scale=True,
        )

    layers = [layer(number, shared) for number, shared in enumerate(_shared_layers(fields, types))]
    decoder = decoders.decoder(architecture, fields, layers, norm, trained_len, _NAMES, is_tied=True)
    size = 0 if fields.raw("hidden_size_per_layer_input") == 0 else fields.whole("hidden_size_per_layer_input", 256)
    vocab_size = fields.whole("vocab_size_per_layer_input", 262144)
    row = fields.whole("pad_token_id", 0, least=0)
    inputs = LayerInputs(size=size, vocab_size=vocab_size, activation=activation, norm=norm, image_row=row)
    return replace(
        decoder,
        embedding_scale=decoder.hidden_size**0.5,
        embedding_scale_is_rounded=True,
        layer_inputs=inputs if size else None,
        logit_softcap=decoders.softcap(fields, "final_logit_softcapping", 0.0),
    )


def _attention(fields: JsonFields, number: int, kind: str, norm: Norm, trained_len: int) -> Attention:
    """Return a layer's attention. Full layers may have other heads; transformers saves their sizes by layer number."""
    its = decoders.attention(fields, 4, 256, fields.flag("attention_bias"))
    num_kv_heads, head_dim = its.num_kv_heads, its.head_dim
    is_full = kind == _FULL
    values_are_keys = is_full and fields.flag("attention_k_eq_v")
    if of_layers := fields.object("per_layer_config"):
        name = next((name for name in of_layers.names() if name.isdecimal() and int(name) == number), "")  # "05", too
        of_layer = of_layers.object(name) or JsonFields("config.json", {})
        num_kv_heads = of_layer.whole("num_key_value_heads", num_kv_heads)
        head_dim = of_layer.whole("head_dim", head_dim)
    elif is_full:
        head_dim = fields.whole("global_head_dim", 512)
        if values_are_keys and fields.raw("num_global_key_value_heads") is not None:
            num_kv_heads = fields.whole("num_global_key_value_heads")
    if its.num_heads % num_kv_heads:
        raise ConfigError(f"config.json: {its.num_heads} attention heads are no multiple of {num_kv_heads} KV heads")
    return replace(
        its,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=1.0,
        q_norm=norm,
        k_norm=norm,
        v_norm_eps=norm.eps,
        values_are_keys=values_are_keys,
        rope=_rope(fields, kind, head_dim, trained_len),
        window=None if is_full else decoders.window(fields, 512),
    )


def _rope(fields: JsonFields, kind: str, head_dim: int, trained_len: int) -> RopeConfig:
    is_said = fields.object("rope_parameters") is not None
    settings = rope_settings(fields, kind) if is_said else JsonFields("config.json", _USUAL_ROPES[kind])
    return parse_rope(fields, trained_len, head_dim, settings=settings)[0]


def _shared_layers(fields: JsonFields, types: Sequence[str]) -> list[int | None]:
    """Return for each layer the one whose KV it reads: the last of its type with its own, or None for its own."""
    shared = 0 if fields.raw("num_kv_shared_layers") in (None, 0) else fields.whole("num_kv_shared_layers")
    first = len(types) - shared
    if first < 1 or set(types[:first]) != set(types):
        raise ConfigError(
            f"config.json: num_kv_shared_layers, {shared} of {len(types)}, leaves a type of layers no keys and values"
        )
    last = {kind: number for number, kind in enumerate(types[:first])}
    return [None if number < first else last[kind] for number, kind in enumerate(types)]


def _beside_mlp(fields: JsonFields, norm: Norm, activation: Activation) -> BesideMLP:
    router = Router(top_k=fields.whole("top_k_experts"), renormalize=True, has_expert_scales=True)
    size, count = fields.whole("moe_intermediate_size"), fields.whole("num_experts")
    experts = Experts(count=count, size=size, router=router, activation=activation)
    return BesideMLP(experts=experts, norm=norm, post=norm, mlp_post=norm)


GEMMA4 = decoders.decoder_family(
    ("Gemma4ForCausalLM",),
    parse,
    *(f".self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm", "v_norm")),  # of layers that share
)
