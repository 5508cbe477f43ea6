"""Ministral 3: YaRN, and queries that grow with their position."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm, QueryGrowth
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope, rope_settings

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Rotary settings, unless config.json has any."""


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    attention = decoders.attention(fields, num_kv_heads=8, head_dim=128)
    trained_len = fields.whole("max_position_embeddings", 262144)
    is_silent = fields.raw("rope_parameters") is None and fields.raw("rope_scaling") is None
    settings = JsonFields("config.json", _ROPE) if is_silent else rope_settings(fields)
    rope, max_model_len = parse_rope(fields, trained_len, attention.head_dim, settings=settings)
    beta = settings.number("llama_4_scaling_beta", 0.0)
    growth = QueryGrowth(beta=beta, length=settings.whole("original_max_position_embeddings")) if beta else None
    window = None if fields.raw("sliding_window") is None else fields.whole("sliding_window")
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-5))
    mlp = DenseMLP(size=fields.whole("intermediate_size"), activation=decoders.activation(fields))
    mixer = replace(attention, rope=rope, window=window, query_growth=growth)
    layers = [Layer(mixer_norm=norm, mixer=mixer, mlp_norm=norm, mlp=mlp)] * decoders.num_layers(fields)
    return decoders.decoder(architecture, fields, layers, norm, max_model_len)


MINISTRAL = decoders.decoder_family(("Ministral3ForCausalLM",), parse)
