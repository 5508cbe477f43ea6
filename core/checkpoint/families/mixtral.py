"""Mixtral: experts in every layer."""

from penstock.core.checkpoint.decoder import Attention, Decoder, Experts, Layer, Norm, Router
from penstock.core.checkpoint.families import decoders
from penstock.core.checkpoint.families.rope import parse_rope
from penstock.core.checkpoint.json_fields import JsonFields
from penstock.core.checkpoint.names import Names

NAMES = Names(
    router="block_sparse_moe.gate",
    correction="block_sparse_moe.e_score_correction_bias",
    expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    expert_down="block_sparse_moe.experts.{}.w2",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """As `Family.parse`."""
    hidden_size = fields.whole("hidden_size")
    num_heads, num_kv_heads = decoders.head_counts(fields, 8)
    head_dim = fields.whole("head_dim", hidden_size // num_heads)
    rope, max_model_len = parse_rope(fields, fields.whole("max_position_embeddings", 131072), head_dim, theta=1e6)
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-5))
    mixer = Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        window=decoders.window(fields, None),
    )
    experts = Experts(
        count=fields.whole("num_local_experts", 8),
        size=fields.whole("intermediate_size"),
        router=Router(top_k=fields.whole("num_experts_per_tok", 2), renormalize=True),
        activation=decoders.activation(fields),
    )
    layer = Layer(mixer_norm=norm, mixer=mixer, mlp_norm=norm, mlp=experts)
    return Decoder(
        architecture=architecture,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden_size,
        layers=(layer,) * fields.whole("num_hidden_layers", most=decoders.MAX_LAYERS),
        final_norm=norm,
        tied_embeddings=fields.flag("tie_word_embeddings"),
        max_model_len=max_model_len,
        checkpoint_dtype=decoders.dtype(fields),
        names=NAMES,
    )


MIXTRAL = decoders.decoder_family(["MixtralForCausalLM"], parse)
