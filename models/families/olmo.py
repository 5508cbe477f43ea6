"""OLMo 2 and 3: no norms before blocks; q and k are normed as a whole, and so is each block's output.

In OLMo 3 three layers of four attend to a window, and only the others have scaled positions.
"""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope, rope_settings

_NAMES = Names(post_mixer_norm="post_attention_layernorm", post_mlp_norm="post_feedforward_layernorm")


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    attention = decoders.attention(fields, has_bias=fields.flag("attention_bias"))
    trained_len = fields.whole("max_position_embeddings", 2048)
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-5))
    attention = replace(attention, q_norm=norm, k_norm=norm, norms_span="all")
    mlp = DenseMLP(size=fields.whole("intermediate_size"), activation=decoders.activation(fields))
    num_layers = decoders.num_layers(fields)
    if architecture == "Olmo2ForCausalLM":
        rope, max_model_len = parse_rope(fields, trained_len, attention.head_dim)
        mixers = [replace(attention, rope=rope)] * num_layers
    else:
        rope, max_model_len = parse_rope(
            fields, trained_len, attention.head_dim, settings=_settings(fields, "full_attention"), theta=500000.0
        )
        near, _ = parse_rope(
            fields, trained_len, attention.head_dim, settings=_settings(fields, "sliding_attention"), theta=500000.0
        )
        of_kinds = {
            "full_attention": replace(attention, rope=rope),
            "sliding_attention": replace(attention, rope=near, window=fields.whole("sliding_window", 4096)),
        }
        mixers = [of_kinds[kind] for kind in decoders.layer_types(fields, num_layers, decoders.every(4, num_layers))]
    layers = [Layer(mixer=mixer, post_mixer_norm=norm, mlp=mlp, post_mlp_norm=norm) for mixer in mixers]
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, _NAMES)


def _settings(fields: JsonFields, kind: str) -> JsonFields:
    """Return the rotary settings of a kind of layers. Scaling without a kind belongs to layers without a window."""
    scaling = fields.object("rope_scaling")
    if scaling is not None and not scaling.has_objects():
        return scaling if kind == "full_attention" else JsonFields("config.json", {})
    return rope_settings(fields, kind)


OLMO = decoders.decoder_family(("Olmo2ForCausalLM", "Olmo3ForCausalLM"), parse)
