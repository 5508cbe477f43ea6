"""OLMo Hybrid: the gated delta rule behind norms in most layers, OLMo 3's attention before norms in every fourth."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.description.recurrent import GatedDelta
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.recurrent import conv_width, kinds_of_layers, refuse_groups
from penstock.models.parsing.rope import RopeConfig, parse_rope

_NAMES = Names(
    post_mixer_norm="post_attention_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
    recurrent_in=("linear_attn.q_proj", "linear_attn.k_proj", "linear_attn.v_proj", "linear_attn.g_proj"),
    recurrent_gates=("linear_attn.b_proj", "linear_attn.a_proj"),
    recurrent_conv=("linear_attn.q_conv1d", "linear_attn.k_conv1d", "linear_attn.v_conv1d"),
    recurrent_norm="linear_attn.o_norm",
    recurrent_out="linear_attn.o_proj",
    a_log="linear_attn.A_log",
    dt_bias="linear_attn.dt_bias",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    num_layers, norm = decoders.num_layers(fields), Norm(eps=fields.number("rms_norm_eps", 1e-6))
    its = decoders.attention(fields, has_bias=fields.flag("attention_bias"))
    rope, max_model_len = _rope(fields, its.head_dim)
    mlp = DenseMLP(size=fields.whole("intermediate_size", 11008), activation=decoders.activation(fields))
    attention = Layer(
        mixer=replace(its, rope=rope, q_norm=norm, k_norm=norm, norms_span="all"),
        post_mixer_norm=norm,
        mlp=mlp,
        post_mlp_norm=norm,
    )
    recurrent = Layer(mixer_norm=norm, mixer=_delta(fields, its.num_heads), mlp_norm=norm, mlp=mlp)
    usual = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)]
    if "full_attention" not in usual:
        usual[-1] = "full_attention"
    kinds = kinds_of_layers(fields, num_layers, usual)
    layers = [attention if kind == "attention" else recurrent for kind in kinds]
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, _NAMES)


def _rope(fields: JsonFields, head_dim: int) -> tuple[RopeConfig | None, int]:
    """Return what rotates positions, and the longest sequence; published models say by a null that nothing does."""
    trained_len = fields.whole("max_position_embeddings", 65536)
    settings = fields.object("rope_parameters")
    named = [(fields, "rope_parameters"), (fields, "rope_theta")]
    named += [] if settings is None else [(settings, "rope_theta"), (settings, "rope_type")]
    if any(where.has(name) and where.raw(name) is None for where, name in named):
        return None, trained_len
    return parse_rope(fields, trained_len, head_dim)


def _delta(fields: JsonFields, num_heads: int) -> GatedDelta:
    num_key_heads = fields.whole("linear_num_key_heads", num_heads)
    num_value_heads = fields.whole("linear_num_value_heads", num_heads)
    refuse_groups("linear_num_value_heads", num_value_heads, "linear_num_key_heads", num_key_heads)
    key_dim = fields.whole("linear_key_head_dim", int(0.75 * fields.whole("hidden_size") / num_key_heads))
    return GatedDelta(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=key_dim,
        value_dim=fields.whole("linear_value_head_dim", 2 * key_dim),
        conv_width=conv_width(fields, "linear_conv_kernel_dim", 4),
        norm_eps=1e-5,  # whatever the other norms have
        max_beta=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
    )


OLMO_HYBRID = decoders.decoder_family(
    ("OlmoHybridForCausalLM",),
    parse,
    renamed={"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"},
)
