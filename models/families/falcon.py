"""Falcon (2023): attention and MLP in parallel, q heads stored with the key and the value that they share."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.family import NotDescribed
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope

_NAMES = Names(
    embedding="transformer.word_embeddings",
    layer="transformer.h.{}.",
    final_norm="transformer.ln_f",
    qkv=("self_attention.query_key_value",),
    qkv_by_head=True,
    o="self_attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """As `Family.parse`."""
    if fields.flag("alibi"):
        raise NotDescribed("config.json: alibi, biases of scores in place of rotations, is not supported")
    is_new, is_parallel = fields.flag("new_decoder_architecture"), fields.flag("parallel_attn", True)
    num_heads = fields.whole("num_attention_heads")
    num_kv_heads = num_heads
    if is_new:
        is_parallel, num_kv_heads = True, fields.whole("num_kv_heads", num_heads)
    elif fields.flag("multi_query", True):
        num_kv_heads = 1
    has_bias, hidden = fields.flag("bias"), fields.whole("hidden_size")
    attention = decoders.attention(fields.changed(num_key_value_heads=num_kv_heads), has_bias=has_bias)
    rope, max_model_len = parse_rope(fields, fields.whole("max_position_embeddings", 2048), attention.head_dim)
    norm = Norm(kind="layer", eps=fields.number("layer_norm_epsilon", 1e-5), has_bias=True)
    has_two = is_new and fields.whole("num_ln_in_parallel_attn", 2) == 2
    layer = Layer(
        mixer_norm=norm,
        mixer=replace(attention, rope=rope),
        mlp_norm=norm if has_two or not is_parallel else None,
        mlp=DenseMLP(
            size=fields.whole("ffn_hidden_size", 4 * hidden),
            activation=decoders.activation(fields, "activation", default="gelu"),
            is_gated=False,
            has_bias=has_bias,
        ),
        is_parallel=is_parallel,
    )
    names = replace(_NAMES, mixer_norm="ln_attn", mlp_norm="ln_mlp") if has_two else _NAMES
    layers = [layer] * decoders.num_layers(fields)
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, names, is_tied=True)


FALCON = decoders.decoder_family(("FalconForCausalLM",), parse)
