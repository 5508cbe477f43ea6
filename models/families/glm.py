"""GLM-4 (GLM-4-9B of 2024 and 2025, GLM-Z1) and the mixtures GLM-4.5, 4.6 and 4.7.

They rotate half of each head. The dense models pair neighbours; those of 2025 also norm each block's output.
"""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Experts, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope

_FUSED = Names(gate_up=("mlp.gate_up_proj",))
_SANDWICH = replace(_FUSED, post_mixer_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm")


def parse_dense(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`, for the dense ones."""
    is_sandwich = architecture == "Glm4ForCausalLM"
    attention = decoders.attention(fields, num_kv_heads=2, head_dim=128)
    trained_len = fields.whole("max_position_embeddings", 131072)
    rope, max_model_len = parse_rope(fields, trained_len, attention.head_dim, share=0.5, is_interleaved=True)
    norm = Norm(eps=fields.number("rms_norm_eps", 1.5625e-7))
    layer = Layer(
        mixer_norm=norm,
        mixer=replace(attention, rope=rope, qkv_bias=fields.flag("attention_bias", True)),
        post_mixer_norm=norm if is_sandwich else None,
        mlp_norm=norm,
        mlp=DenseMLP(size=fields.whole("intermediate_size"), activation=decoders.activation(fields)),
        post_mlp_norm=norm if is_sandwich else None,
    )
    layers = [layer] * decoders.num_layers(fields)
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, _SANDWICH if is_sandwich else _FUSED)


def parse_mixture(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`, for the mixtures."""
    attention = decoders.attention(fields, num_kv_heads=8)
    trained_len = fields.whole("max_position_embeddings", 131072)
    rope, max_model_len = parse_rope(fields, trained_len, attention.head_dim, share=0.5)
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-5))
    qk_norm = norm if fields.flag("use_qk_norm") else None
    act, size = decoders.activation(fields), fields.whole("moe_intermediate_size", 1408)
    experts = Experts(
        count=fields.whole("n_routed_experts", 128),
        size=size,
        router=decoders.sigmoid_router(fields, top_k=8),
        activation=act,
        shared=DenseMLP(size=size * fields.whole("n_shared_experts", 1), activation=act),
    )
    dense = DenseMLP(size=fields.whole("intermediate_size", 10944), activation=act)
    qkv_bias = fields.flag("attention_bias")
    mixer = replace(attention, rope=rope, q_norm=qk_norm, k_norm=qk_norm, qkv_bias=qkv_bias)
    first, num_layers = fields.whole("first_k_dense_replace", 1, least=0), decoders.num_layers(fields)
    mlps = [dense] * min(first, num_layers) + [experts] * (num_layers - first)
    layers = [Layer(mixer_norm=norm, mixer=mixer, mlp_norm=norm, mlp=mlp) for mlp in mlps]
    names = Names(unused_layers=fields.whole("num_nextn_predict_layers", 1, least=0, most=decoders.MAX_LAYERS))
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, names)


GLM = decoders.decoder_family(("GlmForCausalLM", "Glm4ForCausalLM"), parse_dense)
GLM_MIXTURE = decoders.decoder_family(("Glm4MoeForCausalLM",), parse_mixture)
