"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused projections, LongRoPE, heads that may be rotated in part."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope

_NAMES = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """As `Family.parse`."""
    attention = decoders.attention(fields)
    trained_len = fields.whole("max_position_embeddings", 4096)
    # The first releases called LongRoPE by these names.
    rope, max_model_len = parse_rope(
        fields, trained_len, attention.head_dim, aliases={"su": "longrope", "yarn": "longrope"}
    )
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-5))
    mlp = DenseMLP(size=fields.whole("intermediate_size"), activation=decoders.activation(fields))
    mixer = replace(attention, rope=rope, window=decoders.window(fields, None))
    layers = [Layer(mixer_norm=norm, mixer=mixer, mlp_norm=norm, mlp=mlp)] * decoders.num_layers(fields)
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, _NAMES)


PHI3 = decoders.decoder_family(["Phi3ForCausalLM"], parse)
