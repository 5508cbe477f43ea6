"""Bamba: Mamba 2 in most layers, attention in some, and a dense MLP in each."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.recurrent import kinds_of_layers, mamba2
from penstock.models.parsing.rope import parse_rope

_NAMES = Names(
    final_norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    num_layers, with_attention = decoders.num_layers(fields), set(fields.wholes("attn_layer_indices"))
    kinds = ["attention" if i in with_attention else "mamba" for i in range(num_layers)]
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-5))
    its = decoders.attention(fields, num_kv_heads=8, has_bias=fields.flag("attention_bias"))
    rope, max_model_len = parse_rope(fields, fields.whole("max_position_embeddings", 262144), its.head_dim, share=0.5)
    attention = Layer(
        mixer_norm=norm,
        mixer=replace(its, rope=rope),
        mlp_norm=norm,
        mlp=DenseMLP(
            size=fields.whole("intermediate_size", 14336),
            activation=decoders.activation(fields),
            has_bias=fields.flag("mlp_bias"),
        ),
    )
    recurrent = replace(attention, mixer=mamba2(fields, 128, norm.eps))
    layers = [attention if kind == "attention" else recurrent for kind in kinds_of_layers(fields, num_layers, kinds)]
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, _NAMES)


BAMBA = decoders.decoder_family(("BambaForCausalLM",), parse)
