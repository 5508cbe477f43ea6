"""StableLM: LayerNorms, a quarter of each head rotated; the 12B has parallel blocks and norms for each head."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope

_NAMES = Names(q_norm="self_attn.q_layernorm.norms.{}", k_norm="self_attn.k_layernorm.norms.{}")


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    attention = decoders.attention(fields, num_kv_heads=32)
    trained_len = fields.whole("max_position_embeddings", 4096)
    rope, max_model_len = parse_rope(fields, trained_len, attention.head_dim, share=0.25)
    norm = Norm(kind="layer", eps=fields.number("layer_norm_eps", 1e-5), has_bias=True)
    qk_norm = replace(norm, has_bias=False) if fields.flag("qk_layernorm") else None
    is_parallel = fields.flag("use_parallel_residual")
    layer = Layer(
        mixer_norm=norm,
        mixer=replace(
            attention,
            rope=rope,
            qkv_bias=fields.flag("use_qkv_bias"),
            q_norm=qk_norm,
            k_norm=qk_norm,
            norms_span="each head",
        ),
        mlp_norm=None if is_parallel else norm,
        mlp=DenseMLP(size=fields.whole("intermediate_size"), activation=decoders.activation(fields)),
        is_parallel=is_parallel,
    )
    return decoders.decoder(architecture, fields, [layer] * decoders.num_layers(fields), norm, max_model_len, _NAMES)


STABLELM = decoders.decoder_family(("StableLmForCausalLM",), parse)
