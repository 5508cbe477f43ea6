"""SmolLM3: a Llama in which every fourth layer has no positional encoding."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    attention = decoders.attention(fields, num_kv_heads=4, has_bias=fields.flag("attention_bias"))
    trained_len = fields.whole("max_position_embeddings", 32768)
    rope, max_model_len = parse_rope(fields, trained_len, attention.head_dim, theta=2000000.0)
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-6))
    mlp = DenseMLP(
        size=fields.whole("intermediate_size"), activation=decoders.activation(fields), has_bias=fields.flag("mlp_bias")
    )
    rotates = decoders.rotates(fields)
    has_window = fields.flag("use_sliding_window") and fields.raw("sliding_window") is not None
    by_place = ["sliding_attention" if has_window and not rotated else "full_attention" for rotated in rotates]
    kinds = decoders.layer_types(fields, len(rotates), by_place)
    windows = [fields.whole("sliding_window") if has_window and kind == "sliding_attention" else None for kind in kinds]
    mixers = [
        replace(attention, rope=rope if rotated else None, window=window)
        for rotated, window in zip(rotates, windows, strict=True)
    ]
    layers = [Layer(mixer_norm=norm, mixer=mixer, mlp_norm=norm, mlp=mlp) for mixer in mixers]
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, is_tied=True)


SMOLLM = decoders.decoder_family(("SmolLM3ForCausalLM",), parse)
