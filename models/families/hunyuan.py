"""Hunyuan (dense): q and k are normed by head after their rotation."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import RopeConfig, parse_rope, rope_settings

_NAMES = Names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    attention = decoders.attention(fields, has_bias=fields.flag("attention_bias"))
    rope, max_model_len = _rope(fields, attention.head_dim)
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-5))
    layer = Layer(
        mixer_norm=norm,
        mixer=replace(attention, rope=rope, q_norm=norm, k_norm=norm, norms_follow_rope=True),
        mlp_norm=norm,
        mlp=DenseMLP(size=fields.whole("intermediate_size"), activation=decoders.activation(fields)),
    )
    return decoders.decoder(architecture, fields, [layer] * decoders.num_layers(fields), norm, max_model_len, _NAMES)


def _rope(fields: JsonFields, head_dim: int) -> tuple[RopeConfig, int]:
    """Return the rotation. "dynamic" with an `alpha` means a fixed, stretched base in these checkpoints."""
    trained_len, settings = fields.whole("max_position_embeddings", 2048), rope_settings(fields)
    kind, alpha = settings.text("rope_type") or settings.text("type"), settings.number("alpha", 0.0)
    if kind != "dynamic" or not alpha:
        return parse_rope(fields, trained_len, head_dim)
    plain = JsonFields("config.json", {"rope_theta": settings.raw("rope_theta")})
    rope, max_model_len = parse_rope(fields, trained_len, head_dim, settings=plain)
    return replace(rope, theta=rope.theta * alpha ** (head_dim / (head_dim - 2))), max_model_len


HUNYUAN = decoders.decoder_family(("HunYuanDenseV1ForCausalLM",), parse)
