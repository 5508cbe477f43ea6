"""gpt-oss: attention sinks, windows on some layers, biases, and clamped experts whose gates and ups alternate."""

from msgspec.structs import replace

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Decoder, Experts, Layer, Norm, Router
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope, rope_settings

_ALPHA, _LIMIT = 1.702, 7.0  # of the clamped activation, in every published model

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rotary settings, unless config.json has any."""
_NAMES = Names(
    router="mlp.router",
    experts="turned",
    experts_alternate=True,
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """As `Family.parse`."""
    num_layers = decoders.num_layers(fields)
    attention = decoders.attention(fields, 8, 64, fields.flag("attention_bias", True))
    is_silent = fields.raw("rope_parameters") is None and fields.raw("rope_scaling") is None
    settings = JsonFields("config.json", _ROPE) if is_silent else rope_settings(fields)
    trained_len = fields.whole("max_position_embeddings", 131072)
    rope, max_model_len = parse_rope(fields, trained_len, attention.head_dim, settings=settings, theta=150000.0)
    if (fields.number("swiglu_alpha", _ALPHA), fields.number("swiglu_limit", _LIMIT)) != (_ALPHA, _LIMIT):
        raise ConfigError(f"config.json: only swiglu_alpha {_ALPHA} and swiglu_limit {_LIMIT:g} are supported")
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-5))
    mlp = Experts(
        count=fields.whole("num_local_experts", 128),
        size=fields.whole("intermediate_size"),
        router=Router(kind="top_softmax", top_k=fields.whole("num_experts_per_tok", 4), has_bias=True),
        activation="clamped_swiglu",
        has_bias=True,
    )

    def layer(window: int | None) -> Layer:
        mixer = replace(attention, rope=rope, window=window, has_sinks=True)
        return Layer(mixer_norm=norm, mixer=mixer, mlp_norm=norm, mlp=mlp)

    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    layers = [layer(window) for window in decoders.windows(fields, num_layers, alternating, 128)]
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, _NAMES)


GPT_OSS = decoders.decoder_family(["GptOssForCausalLM"], parse)
