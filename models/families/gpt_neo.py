"""GPT-Neo (2021): learned positions, every other layer with a window, scores that are not scaled."""

from msgspec.structs import replace

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Decoder, DenseMLP, Layer, LearnedPositions, Norm
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields

_NAMES = Names(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.h.{}.",
    final_norm="transformer.ln_f",
    mixer_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    o="attn.attention.out_proj",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """As `Family.parse`."""
    num_layers, hidden = fields.whole("num_layers", 24, most=decoders.MAX_LAYERS), fields.whole("hidden_size", 2048)
    fields = fields.changed(num_attention_heads=fields.whole("num_heads", 16))
    kinds = fields.texts("attention_layers") or ["local" if i % 2 else "global" for i in range(num_layers)]
    if len(kinds) != num_layers or not {*kinds} <= {"global", "local"}:
        raise ConfigError(f"config.json: attention_layers must say global or local for each of {num_layers} layers")
    norm = Norm(kind="layer", eps=fields.number("layer_norm_epsilon", 1e-5), has_bias=True)
    attention = replace(decoders.attention(fields, has_groups=False), scale=1.0, o_bias=True)
    window = fields.whole("window_size", 256)
    mlp = DenseMLP(
        size=fields.whole("intermediate_size", 4 * hidden),
        activation=decoders.activation(fields, "activation_function", default="gelu_new"),
        is_gated=False,
        has_bias=True,
    )
    mixers = [replace(attention, window=window) if kind == "local" else attention for kind in kinds]
    layers = [Layer(mixer_norm=norm, mixer=mixer, mlp_norm=norm, mlp=mlp) for mixer in mixers]
    num_positions = fields.whole("max_position_embeddings", 2048)
    decoder = decoders.decoder(architecture, fields, layers, norm, num_positions, _NAMES, is_tied=True)
    return replace(decoder, positions=LearnedPositions(count=num_positions))


GPT_NEO = decoders.decoder_family(
    ("GPTNeoForCausalLM",), parse, ".attention.bias", ".attention.masked_bias", base="transformer."
)
