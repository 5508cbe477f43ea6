"""GPT-2: learned positions, LayerNorms, biases everywhere, matrices stored as [in, out]."""

from msgspec.structs import replace

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Attention, Decoder, DenseMLP, Layer, LearnedPositions, Norm
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
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    is_transposed=True,
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    if fields.flag("add_cross_attention"):
        raise ConfigError("config.json: add_cross_attention: a decoder of encoded texts is not supported")
    hidden_size, num_heads = fields.whole("n_embd", 768), fields.whole("n_head", 12)
    norm = Norm(kind="layer", eps=fields.number("layer_norm_epsilon", 1e-5), has_bias=True)
    mlp = DenseMLP(
        size=fields.whole("n_inner", 4 * hidden_size),
        activation=decoders.activation(fields, "activation_function", "gelu_new"),
        is_gated=False,
        has_bias=True,
    )
    head_dim = decoders.usual_head_dim(hidden_size, num_heads)
    scale = head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    attention = Attention(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, scale=scale, qkv_bias=True, o_bias=True
    )
    shrinks = fields.flag("scale_attn_by_inverse_layer_idx")
    mixers = [
        replace(attention, scale=scale / (i + 1) if shrinks else scale)
        for i in range(fields.whole("n_layer", 12, most=decoders.MAX_LAYERS))
    ]
    num_positions = fields.whole("n_positions", 1024)
    return Decoder(
        architecture=architecture,
        vocab_size=fields.whole("vocab_size", 50257),
        hidden_size=hidden_size,
        layers=tuple(Layer(mixer_norm=norm, mixer=mixer, mlp_norm=norm, mlp=mlp) for mixer in mixers),
        final_norm=norm,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        positions=LearnedPositions(count=num_positions),
        max_model_len=num_positions,
        checkpoint_dtype=decoders.dtype(fields),
        names=_NAMES,
    )


GPT2 = decoders.decoder_family(("GPT2LMHeadModel",), parse, ".attn.bias", ".attn.masked_bias", base="transformer.")
