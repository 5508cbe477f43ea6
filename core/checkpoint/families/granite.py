"""Granite 3, dense and as mixtures of experts: multipliers of embeddings, scores, residuals and logits."""

from msgspec.structs import replace

from penstock.core.checkpoint.decoder import Decoder, DenseMLP, Experts, Layer, Norm, Router
from penstock.core.checkpoint.families import decoders
from penstock.core.checkpoint.families.rope import parse_rope
from penstock.core.checkpoint.json_fields import JsonFields
from penstock.core.checkpoint.names import Names
from penstock.core.config.options import ConfigError

_EXPERTS = Names(
    router="block_sparse_moe.router.layer",
    expert_gate_up=("block_sparse_moe.input_linear.weight",),
    expert_down="block_sparse_moe.output_linear.weight",
    shared_gate_up=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    attention = decoders.attention(fields, has_bias=fields.flag("attention_bias"))
    rope, max_model_len = parse_rope(fields, fields.whole("max_position_embeddings", 2048), attention.head_dim)
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-6))
    layer = Layer(
        mixer_norm=norm,
        mixer=replace(attention, rope=rope, scale=fields.number("attention_multiplier", 1.0)),
        mlp_norm=norm,
        mlp=_dense(fields) if architecture == "GraniteForCausalLM" else _experts(fields),
        residual_scale=fields.number("residual_multiplier", 1.0),
    )
    layers = [layer] * decoders.num_layers(fields)
    logits_scaling = fields.number("logits_scaling", 1.0)
    if not logits_scaling:
        raise ConfigError("config.json: logits_scaling divides, and must not be 0")
    return replace(
        decoders.decoder(architecture, fields, layers, norm, max_model_len, _EXPERTS),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / logits_scaling,
    )


def _dense(fields: JsonFields) -> DenseMLP:
    return DenseMLP(
        size=fields.whole("intermediate_size"),
        activation=decoders.activation(fields),
        has_bias=fields.flag("mlp_bias"),
    )


def _experts(fields: JsonFields) -> Experts:
    shared = fields.whole("shared_intermediate_size", 0, least=0)
    return Experts(
        count=fields.whole("num_local_experts", 8),
        size=fields.whole("intermediate_size"),
        router=Router(kind="top_softmax", top_k=fields.whole("num_experts_per_tok", 2)),
        activation=decoders.activation(fields),
        shared=DenseMLP(size=shared, activation=decoders.activation(fields)) if shared else None,
    )


GRANITE = decoders.decoder_family(("GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), parse)
