"""OPT and Galactica: learned positions, LayerNorms, ReLU (Galactica: GELU)."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, LearnedPositions, Norm
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.family import NotDescribed
from penstock.models.parsing.json_fields import JsonFields

_NAMES = Names(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    layer="model.decoder.layers.{}.",
    final_norm="model.decoder.final_layer_norm",
    mixer_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    o="self_attn.out_proj",
    gate_up=("fc1",),
    down="fc2",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    hidden_size = fields.whole("hidden_size", 768)
    if fields.whole("word_embed_proj_dim", hidden_size) != hidden_size:
        raise NotDescribed(
            "config.json: word_embed_proj_dim is only supported if it is hidden_size (in OPT-350m it is not)"
        )
    if not fields.flag("do_layer_norm_before", True):
        raise NotDescribed("config.json: do_layer_norm_before is only supported if it is true (in OPT-350m it is not)")
    has_bias, has_weight = fields.flag("enable_bias", True), fields.flag("layer_norm_elementwise_affine", True)
    norm = Norm(kind="layer", eps=1e-5, has_weight=has_weight, has_bias=has_weight)
    mlp = DenseMLP(
        size=fields.whole("ffn_dim", 3072),
        activation=decoders.activation(fields, "activation_function", "relu"),
        is_gated=False,
        has_bias=has_bias,
    )
    layer = Layer(
        mixer_norm=norm, mixer=decoders.attention(fields, has_bias=has_bias, has_groups=False), mlp_norm=norm, mlp=mlp
    )
    layers = [layer] * decoders.num_layers(fields)
    final_norm = None if fields.flag("_remove_final_layer_norm") else norm
    num_positions = fields.whole("max_position_embeddings", 2048)
    return replace(
        decoders.decoder(architecture, fields, layers, final_norm, num_positions, _NAMES, is_tied=True),
        positions=LearnedPositions(count=num_positions, offset=2),
    )


OPT = decoders.decoder_family(("OPTForCausalLM",), parse, base="model.")
