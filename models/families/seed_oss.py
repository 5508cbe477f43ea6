"""Seed-OSS: a Llama with biases of q, k and v, and heads wider than the hidden size divided by their number."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    attention = decoders.attention(fields, num_kv_heads=8, head_dim=128)
    rope, max_model_len = parse_rope(fields, fields.whole("max_position_embeddings", 524288), attention.head_dim)
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-6))
    layer = Layer(
        mixer_norm=norm,
        mixer=replace(
            attention,
            rope=rope,
            qkv_bias=fields.flag("attention_bias", True),
            o_bias=fields.flag("attention_out_bias"),
        ),
        mlp_norm=norm,
        mlp=DenseMLP(
            size=fields.whole("intermediate_size"),
            activation=decoders.activation(fields),
            has_bias=fields.flag("mlp_bias"),
        ),
    )
    return decoders.decoder(architecture, fields, [layer] * decoders.num_layers(fields), norm, max_model_len)


SEED_OSS = decoders.decoder_family(("SeedOssForCausalLM",), parse)
