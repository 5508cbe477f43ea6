"""GPT-J (2021): attention and MLP in parallel after one LayerNorm; neighbours rotate; biases in MLP and head."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope

_NAMES = Names(
    embedding="transformer.wte",
    layer="transformer.h.{}.",
    final_norm="transformer.ln_f",
    mixer_norm="ln_1",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    o="attn.out_proj",
    gate_up=("mlp.fc_in",),
    down="mlp.fc_out",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """As `Family.parse`."""
    hidden, max_len = fields.whole("n_embd", 4096), fields.whole("n_positions", 2048)
    num_heads = fields.whole("n_head", 16)
    fields = fields.changed(hidden_size=hidden, num_attention_heads=num_heads)
    attention = decoders.attention(fields, has_groups=False)
    # A rotary_dim that is null would rotate whole heads by angles of the hidden size; no published model has that.
    share = fields.whole("rotary_dim", 64) / attention.head_dim
    rope, max_model_len = parse_rope(fields, max_len, attention.head_dim, share=share, is_interleaved=True)
    norm = Norm(kind="layer", eps=fields.number("layer_norm_epsilon", 1e-5), has_bias=True)
    layer = Layer(
        mixer_norm=norm,
        mixer=replace(attention, rope=rope),
        mlp=DenseMLP(
            size=fields.whole("n_inner", 4 * hidden),
            activation=decoders.activation(fields, "activation_function", default="gelu_new"),
            is_gated=False,
            has_bias=True,
        ),
        is_parallel=True,
    )
    layers = [layer] * fields.whole("n_layer", 28, most=decoders.MAX_LAYERS)
    return replace(decoders.decoder(architecture, fields, layers, norm, max_model_len, _NAMES), head_bias=True)


GPT_J = decoders.decoder_family(("GPTJForCausalLM",), parse, ".attn.bias", ".attn.masked_bias", ".embed_positions")
