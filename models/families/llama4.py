"""Llama 4 (text): every fourth layer has no positional encoding, weights multiply experts' inputs, one is shared.

In the other layers, published models attend within chunks of 8192 positions.
"""

from msgspec.structs import replace

from penstock.models.description.decoder import (
    Attention,
    Decoder,
    DenseMLP,
    Experts,
    Layer,
    Norm,
    QueryGrowth,
    Router,
)
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope

_NAMES = Names(
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    router="feed_forward.router",
    expert_gate_up=("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
    expert_down="feed_forward.experts.{}.down_proj",
    experts="turned",
    shared_gate_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    shared_down="feed_forward.shared_expert.down_proj",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """As `Family.parse`."""
    num_layers = decoders.num_layers(fields)
    attention = decoders.attention(fields, num_kv_heads=8, head_dim=128, has_bias=fields.flag("attention_bias"))
    trained_len = fields.whole("max_position_embeddings", 131072)
    rope, max_model_len = parse_rope(fields, trained_len, attention.head_dim, theta=500000.0, is_interleaved=True)
    has_chunks = not fields.has("attention_chunk_size") or fields.raw("attention_chunk_size") is not None
    chunk = fields.whole("attention_chunk_size", 8192) if has_chunks else max_model_len
    has_chunks = chunk < max_model_len
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-5))
    head_norm = replace(norm, has_weight=False) if fields.flag("use_qk_norm", True) else None
    growth = QueryGrowth(
        beta=fields.number("attn_scale", 0.1), length=fields.number("floor_scale", 8192.0, least=1.0), shift=1
    )
    # The original applies these norms after the rotation, which makes no difference for a norm without weights.
    with_places = replace(
        attention,
        rope=rope,
        q_norm=head_norm,
        k_norm=head_norm,
        window=chunk if has_chunks else None,
        window_is_chunk=has_chunks,
    )
    said = fields.raw("attn_temperature_tuning")
    is_number = isinstance(said, int)  # as in the first published files
    is_tuned = bool(said) if is_number else fields.flag("attn_temperature_tuning", True)
    without = replace(attention, query_growth=growth if is_tuned else None)
    activation = decoders.activation(fields)
    dense = DenseMLP(size=fields.whole("intermediate_size_mlp", 16384), activation=activation)
    size = fields.whole("intermediate_size", 8192)
    experts = Experts(
        count=fields.whole("num_local_experts", 16),
        size=size,
        router=Router(kind="sigmoid", top_k=fields.whole("num_experts_per_tok", 1), multiplies_input=True),
        activation=activation,
        shared=DenseMLP(size=size, activation=activation),
    )

    def layer(mixer: Attention, is_sparse: bool) -> Layer:
        return Layer(mixer_norm=norm, mixer=mixer, mlp_norm=norm, mlp=experts if is_sparse else dense)

    sparse = _sparse(fields, num_layers)
    # The published checkpoints have an empty list of layers that rotate, which means the usual ones.
    rotating = fields if fields.raw("no_rope_layers") else fields.with_fields({"no_rope_layers": None})
    layers = [
        layer(with_places if rotates else without, i in sparse) for i, rotates in enumerate(decoders.rotates(rotating))
    ]
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, _NAMES)


def _sparse(fields: JsonFields, num_layers: int) -> set[int]:
    """The layers with experts."""
    step = fields.whole("interleave_moe_layer_step", 1)
    is_said = fields.raw("moe_layers") is not None
    return set(fields.wholes("moe_layers") if is_said else range(step - 1, num_layers, step))


LLAMA4 = decoders.decoder_family(["Llama4ForCausalLM"], parse)
