"""Phi-1, 1.5 and 2: attention and MLP in parallel after one LayerNorm; biases everywhere, even on the logits."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope

_NAMES = Names(
    final_norm="model.final_layernorm",
    o="self_attn.dense",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    gate_up=("mlp.fc1",),
    down="mlp.fc2",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    attention = decoders.attention(fields, has_bias=True)
    trained_len = fields.whole("max_position_embeddings", 2048)
    rope, max_model_len = parse_rope(fields, trained_len, attention.head_dim, share=0.5)
    norm = Norm(kind="layer", eps=fields.number("layer_norm_eps", 1e-5), has_bias=True)
    qk_norm = norm if fields.flag("qk_layernorm") else None
    layer = Layer(
        mixer_norm=norm,
        mixer=replace(attention, rope=rope, q_norm=qk_norm, k_norm=qk_norm),
        mlp=DenseMLP(
            size=fields.whole("intermediate_size"),
            activation=decoders.activation(fields, default="gelu_new"),
            is_gated=False,
            has_bias=True,
        ),
        is_parallel=True,
    )
    layers = [layer] * decoders.num_layers(fields)
    return replace(decoders.decoder(architecture, fields, layers, norm, max_model_len, _NAMES), head_bias=True)


PHI = decoders.decoder_family(("PhiForCausalLM",), parse)
