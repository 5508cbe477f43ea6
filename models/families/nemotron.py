"""Nemotron 3 and 4 (2024) and Minitron: 1 + w LayerNorms, squared ReLU without gates, half of each head rotated."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    attention = decoders.attention(fields, has_bias=fields.flag("attention_bias"))
    trained_len = fields.whole("max_position_embeddings", 4096)
    rope, max_model_len = parse_rope(fields, trained_len, attention.head_dim, share=0.5)
    norm = Norm(kind="layer", eps=fields.number("norm_eps", 1e-5), offset=1.0, has_bias=True)
    mlp = DenseMLP(
        size=fields.whole("intermediate_size"),
        activation=decoders.activation(fields, default="relu2"),
        is_gated=False,
        has_bias=fields.flag("mlp_bias"),
    )
    layer = Layer(mixer_norm=norm, mixer=replace(attention, rope=rope), mlp_norm=norm, mlp=mlp)
    layers = [layer] * decoders.num_layers(fields)
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, Names(gate_up=("mlp.up_proj",)))


NEMOTRON = decoders.decoder_family(("NemotronForCausalLM",), parse)
