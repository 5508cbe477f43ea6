"""Mixtral: experts in every layer."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, Experts, Layer, Norm, Router
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope

NAMES = Names(
    router="block_sparse_moe.gate",
    correction="block_sparse_moe.e_score_correction_bias",
    expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    expert_down="block_sparse_moe.experts.{}.w2",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """As `Family.parse`."""
    attention = decoders.attention(fields, num_kv_heads=8)
    trained_len = fields.whole("max_position_embeddings", 131072)
    rope, max_model_len = parse_rope(fields, trained_len, attention.head_dim, theta=1e6)
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-5))
    experts = Experts(
        count=fields.whole("num_local_experts", 8),
        size=fields.whole("intermediate_size"),
        router=Router(top_k=fields.whole("num_experts_per_tok", 2), renormalize=True),
        activation=decoders.activation(fields),
    )
    mixer = replace(attention, rope=rope, window=decoders.window(fields, None))
    layers = [Layer(mixer_norm=norm, mixer=mixer, mlp_norm=norm, mlp=experts)] * decoders.num_layers(fields)
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, NAMES)


RENAMED = {".mlp.": ".block_sparse_moe."}
MIXTRAL = decoders.decoder_family(["MixtralForCausalLM"], parse, renamed=RENAMED)
