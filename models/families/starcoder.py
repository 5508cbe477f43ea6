"""StarCoder 2: LayerNorms, biases everywhere, an MLP without gates, a window."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope

_NAMES = Names(gate_up=("mlp.c_fc",), down="mlp.c_proj")


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    has_bias = fields.flag("use_bias", True)
    attention = decoders.attention(fields, num_kv_heads=2, has_bias=has_bias)
    rope, max_model_len = parse_rope(fields, fields.whole("max_position_embeddings", 4096), attention.head_dim)
    window = None if fields.raw("sliding_window") is None else fields.whole("sliding_window")
    norm = Norm(kind="layer", eps=fields.number("norm_epsilon", 1e-5), has_bias=True)
    mlp = DenseMLP(
        size=fields.whole("intermediate_size"),
        activation=decoders.activation(fields, default="gelu_pytorch_tanh"),
        is_gated=False,
        has_bias=has_bias,
    )
    layer = Layer(mixer_norm=norm, mixer=replace(attention, rope=rope, window=window), mlp_norm=norm, mlp=mlp)
    layers = [layer] * decoders.num_layers(fields)
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, _NAMES, is_tied=True)


STARCODER = decoders.decoder_family(("Starcoder2ForCausalLM",), parse)
