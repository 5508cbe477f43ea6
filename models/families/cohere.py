"""Cohere's Command R and Aya: attention and MLP beside each other after one LayerNorm without bias, neighbours rotate.

In the second generation (Command R7B, Command A) most layers attend to a window, and the others have no positional
encoding.
"""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    attention = decoders.attention(fields, has_bias=fields.flag("attention_bias"))
    # model_max_length is the intended length of the first generation, which was trained on less.
    trained_len = fields.whole("model_max_length", fields.whole("max_position_embeddings", 8192))
    theta = 500000.0 if architecture == "CohereForCausalLM" else 10000.0
    rope, max_model_len = parse_rope(fields, trained_len, attention.head_dim, theta=theta, is_interleaved=True)
    norm = Norm(kind="layer", eps=fields.number("layer_norm_eps", 1e-5))
    num_layers = decoders.num_layers(fields)
    if architecture == "CohereForCausalLM":
        qk_norm = norm if fields.flag("use_qk_norm") else None
        mixers = [replace(attention, rope=rope, q_norm=qk_norm, k_norm=qk_norm, norms_span="each head")] * num_layers
    else:
        by_place = decoders.every(fields.whole("sliding_window_pattern", 4), num_layers)
        near = replace(attention, rope=rope, window=fields.whole("sliding_window", 4096))
        kinds = decoders.layer_types(fields, num_layers, by_place)
        mixers = [near if kind == "sliding_attention" else attention for kind in kinds]
    mlp = DenseMLP(size=fields.whole("intermediate_size"), activation=decoders.activation(fields))
    layers = [Layer(mixer_norm=norm, mixer=mixer, mlp=mlp, is_parallel=True) for mixer in mixers]
    return replace(
        decoders.decoder(architecture, fields, layers, norm, max_model_len, is_tied=True),
        logit_scale=fields.number("logit_scale", 0.0625),
    )


COHERE = decoders.decoder_family(("CohereForCausalLM", "Cohere2ForCausalLM"), parse)
