"""MiniMax-M2: norms over all of q and of k, heads that are rotated in part, a sigmoid router with a correction."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, Experts, Layer, Norm, Router
from penstock.models.families import mixtral
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """As `Family.parse`."""
    attention = decoders.attention(fields, num_kv_heads=8, head_dim=128)
    head_dim = attention.head_dim
    share = fields.whole("rotary_dim", head_dim) / head_dim
    trained_len = fields.whole("max_position_embeddings", 196608)
    rope, max_model_len = parse_rope(fields, trained_len, head_dim, theta=5e6, share=share)
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-6))
    top_k = fields.whole("num_experts_per_tok", 8)
    experts = Experts(
        count=fields.whole("num_local_experts", 256),
        size=fields.whole("intermediate_size"),
        router=Router(kind="sigmoid", top_k=top_k, renormalize=True, has_correction=True),
        activation=decoders.activation(fields),
    )
    mixer = replace(attention, rope=rope, q_norm=norm, k_norm=norm, norms_span="all")
    layers = [Layer(mixer_norm=norm, mixer=mixer, mlp_norm=norm, mlp=experts)] * decoders.num_layers(fields)
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, mixtral.NAMES)


MINIMAX = decoders.decoder_family(["MiniMaxM2ForCausalLM"], parse, renamed=mixtral.RENAMED)
