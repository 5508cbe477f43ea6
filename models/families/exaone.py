"""EXAONE 4: q and k are normed by head, and norms are on blocks' outputs instead of their inputs.

In the large model three layers of four attend to a window, and the others have no positional encoding.
"""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope

_NAMES = Names(post_mixer_norm="post_attention_layernorm", post_mlp_norm="post_feedforward_layernorm")


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    attention = decoders.attention(fields, num_kv_heads=32)
    rope, max_model_len = parse_rope(fields, fields.whole("max_position_embeddings", 2048), attention.head_dim)
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-5))
    attention = replace(attention, q_norm=norm, k_norm=norm)
    mlp = DenseMLP(size=fields.whole("intermediate_size"), activation=decoders.activation(fields))
    num_layers = decoders.num_layers(fields)
    if fields.has("sliding_window") and fields.raw("sliding_window") is None:
        mixers = [replace(attention, rope=rope)] * num_layers
    else:
        near = replace(attention, rope=rope, window=fields.whole("sliding_window", 4096))
        # The published pattern "LLLG" is the default one; its config.json names each layer's type, too.
        pattern = (
            4 if isinstance(fields.raw("sliding_window_pattern"), str) else fields.whole("sliding_window_pattern", 4)
        )
        kinds = decoders.layer_types(fields, num_layers, decoders.every(pattern, num_layers))
        mixers = [near if kind == "sliding_attention" else attention for kind in kinds]
    layers = [Layer(mixer=mixer, post_mixer_norm=norm, mlp=mlp, post_mlp_norm=norm) for mixer in mixers]
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, _NAMES)


EXAONE = decoders.decoder_family(("Exaone4ForCausalLM",), parse)
