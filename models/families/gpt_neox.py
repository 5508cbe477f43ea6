"""GPT-NeoX and Pythia: attention and MLP in parallel, each after its own LayerNorm; q, k and v are stored by head."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope

_NAMES = Names(
    embedding="gpt_neox.embed_in",
    layer="gpt_neox.layers.{}.",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    qkv=("attention.query_key_value",),
    qkv_by_head=True,
    o="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    attention = decoders.attention(fields, has_bias=fields.flag("attention_bias", True), has_groups=False)
    rope, max_model_len = parse_rope(
        fields,
        fields.whole("max_position_embeddings", 2048),
        attention.head_dim,
        theta=fields.number("rotary_emb_base", 10000.0),
        share=fields.number("rotary_pct", 0.25),
    )
    norm = Norm(kind="layer", eps=fields.number("layer_norm_eps", 1e-5), has_bias=True)
    layer = Layer(
        mixer_norm=norm,
        mixer=replace(attention, rope=rope),
        mlp_norm=norm,
        mlp=DenseMLP(
            size=fields.whole("intermediate_size"),
            activation=decoders.activation(fields, default="gelu"),
            is_gated=False,
            has_bias=True,
        ),
        is_parallel=fields.flag("use_parallel_residual", True),
    )
    return decoders.decoder(architecture, fields, [layer] * decoders.num_layers(fields), norm, max_model_len, _NAMES)


GPT_NEOX = decoders.decoder_family(("GPTNeoXForCausalLM",), parse, ".attention.bias", ".attention.masked_bias")
