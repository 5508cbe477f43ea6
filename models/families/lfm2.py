"""LFM 2: gated short convolutions in most layers, attention in some; mixtures with experts."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Experts, Layer, Norm, Router
from penstock.models.description.names import Names
from penstock.models.description.recurrent import ShortConv
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.recurrent import conv_width, kinds_of_layers
from penstock.models.parsing.rope import parse_rope

_MIXTURE = "Lfm2MoeForCausalLM"
_NAMES = Names(
    final_norm="model.embedding_norm",
    mixer_norm="operator_norm",
    mlp_norm="ffn_norm",
    o="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    recurrent_in=("conv.in_proj",),
    recurrent_conv=("conv.conv",),
    recurrent_out="conv.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    router="feed_forward.gate",
    correction="feed_forward.expert_bias",
    expert_gate_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
    expert_down="feed_forward.experts.{}.w2",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    num_layers, hidden, is_mixture = decoders.num_layers(fields), fields.whole("hidden_size"), architecture == _MIXTURE
    norm = Norm(eps=fields.number("norm_eps", 1e-5))
    its = decoders.attention(fields, num_kv_heads=8)
    trained_len = fields.whole("max_position_embeddings", 128000)
    rope, max_model_len = parse_rope(fields, trained_len, its.head_dim, theta=1e6)
    attention = replace(its, rope=rope, q_norm=norm, k_norm=norm)
    conv = ShortConv(size=hidden, conv_width=conv_width(fields, "conv_L_cache", 3), has_bias=fields.flag("conv_bias"))
    dense = DenseMLP(size=fields.whole("intermediate_size", 7168) if is_mixture else _inner(fields))
    num_dense = fields.whole("num_dense_layers", 2, least=0) if is_mixture else num_layers
    experts = _experts(fields)

    with_attention = range(num_layers) if fields.raw("full_attn_idxs") is None else fields.wholes("full_attn_idxs")
    usual = () if is_mixture else ["full_attention" if i in with_attention else "conv" for i in range(num_layers)]
    layers = [
        Layer(
            mixer_norm=norm,
            mixer=attention if kind == "attention" else conv,
            mlp_norm=norm,
            mlp=dense if i < num_dense else experts,
        )
        for i, kind in enumerate(kinds_of_layers(fields, num_layers, usual))
    ]
    is_tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))
    decoder = decoders.decoder(architecture, fields, layers, norm, max_model_len, _NAMES)
    return replace(decoder, tied_embeddings=is_tied)


def _inner(fields: JsonFields) -> int:
    """Return the size of the gated MLPs; config.json has the size of equivalent ones without gates."""
    size = fields.whole("block_ff_dim", fields.whole("intermediate_size", 12288))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if fields.has("block_ffn_dim_multiplier") and fields.raw("block_ffn_dim_multiplier") is None:
        return size
    multiple = fields.whole("block_multiple_of", 256)
    return -(-int(fields.number("block_ffn_dim_multiplier", 1.0) * size) // multiple) * multiple


def _experts(fields: JsonFields) -> Experts:
    return Experts(
        count=fields.whole("num_experts", 32),
        size=fields.whole("moe_intermediate_size", 1792),
        router=Router(
            kind="sigmoid",
            top_k=fields.whole("num_experts_per_tok", 4),
            renormalize=fields.flag("norm_topk_prob", True),
            renormalize_eps=1e-6,
            has_correction=fields.flag("use_expert_bias", True),
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
    )


LFM2 = decoders.decoder_family(("Lfm2ForCausalLM", _MIXTURE), parse)
