"""SmolLM3: a Llama whose every fourth layer knows no positions."""

from msgspec.structs import replace

from penstock.core.checkpoint.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.core.checkpoint.families import decoders
from penstock.core.checkpoint.families.rope import parse_rope
from penstock.core.checkpoint.json_fields import JsonFields
from penstock.core.config.options import ConfigError


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    attention = decoders.attention(fields, num_kv_heads=4, has_bias=fields.flag("attention_bias"))
    trained_len = fields.whole("max_position_embeddings", 32768)
    rope, max_model_len = parse_rope(fields, trained_len, attention.head_dim, theta=2000000.0)
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-6))
    mlp = DenseMLP(
        size=fields.whole("intermediate_size"), activation=decoders.activation(fields), has_bias=fields.flag("mlp_bias")
    )
    rotates = _rotates(fields)
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


def _rotates(fields: JsonFields) -> list[bool]:
    """Whether each layer's q and k are rotated."""
    num_layers = decoders.num_layers(fields)
    said = fields.raw("no_rope_layers")
    if said is None:
        interval = fields.whole("no_rope_layer_interval", 4)
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(said, list) or len(said) != num_layers or any(flag not in (0, 1) for flag in said):
        raise ConfigError(f"config.json: no_rope_layers must be a list of {num_layers} times 0 or 1")
    return [bool(flag) for flag in said]


SMOLLM = decoders.decoder_family(("SmolLM3ForCausalLM",), parse)
