"""Granite 3, dense and as mixtures of experts, and Granite 4, most of whose layers are Mamba 2; and HyperCLOVA X.

Embeddings, scores, residuals and logits have multipliers.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Decoder, DenseMLP, Experts, Layer, Norm, Router
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.recurrent import kinds_of_layers, mamba2
from penstock.models.parsing.rope import parse_rope

_DENSE = Names()
_PERI = Names(post_mixer_norm="post_norm1", post_mlp_norm="post_norm2")
_HYBRID, _CLOVA = "GraniteMoeHybridForCausalLM", "HyperCLOVAXForCausalLM"
_EXPERTS = Names(
    router="block_sparse_moe.router.layer",
    expert_gate_up=("block_sparse_moe.input_linear.weight",),
    expert_down="block_sparse_moe.output_linear.weight",
    shared_gate_up=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
    gate_up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    attention = decoders.attention(fields, has_bias=fields.flag("attention_bias"))
    rope, max_model_len = parse_rope(fields, fields.whole("max_position_embeddings", 2048), attention.head_dim)
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-6))
    is_dense, rotates = architecture in ("GraniteForCausalLM", _CLOVA), True
    is_clova = architecture == _CLOVA
    has_post_norms = is_clova and fields.flag("use_post_norm", True)
    usual_scale = attention.head_dim**-0.5 if is_clova else 1.0
    kinds: Sequence[str] = ["attention"] * decoders.num_layers(fields)
    if architecture == _HYBRID:
        kinds = kinds_of_layers(fields, len(kinds), ["mamba"] * len(kinds))
        rotates = fields.text("position_embedding_type") == "rope"
    layer = Layer(
        mixer_norm=norm,
        mixer=replace(
            attention, rope=rope if rotates else None, scale=fields.number("attention_multiplier", usual_scale)
        ),
        post_mixer_norm=norm if has_post_norms else None,
        mlp_norm=norm,
        post_mlp_norm=norm if has_post_norms else None,
        mlp=_dense(fields) if is_dense else _mixture(fields, 1024 if architecture == _HYBRID else 0),
        residual_scale=fields.number("residual_multiplier", 1.0),
    )
    layers = [layer] * len(kinds)
    if "recurrent" in kinds:
        recurrent = replace(layer, mixer=mamba2(fields, 128, norm.eps))
        layers = [layer if kind == "attention" else recurrent for kind in kinds]
    logits_scaling = fields.number("logits_scaling", 1.0)
    if not logits_scaling:
        raise ConfigError("config.json: logits_scaling divides, and must not be 0")
    names = _PERI if has_post_norms else _DENSE if is_dense else _EXPERTS
    return replace(
        decoders.decoder(architecture, fields, layers, norm, max_model_len, names),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=logits_scaling if is_clova else 1.0 / logits_scaling,
    )


def _dense(fields: JsonFields) -> DenseMLP:
    return DenseMLP(
        size=fields.whole("intermediate_size"),
        activation=decoders.activation(fields),
        has_bias=fields.flag("mlp_bias"),
    )


def _mixture(fields: JsonFields, shared_size: int) -> DenseMLP | Experts:
    """Return experts with a shared MLP, or that MLP alone."""
    size = fields.whole("shared_intermediate_size", shared_size, least=0)
    shared = DenseMLP(size=size, activation=decoders.activation(fields)) if size else None
    count = fields.whole("num_local_experts", 8, least=0)
    if not count and shared is not None:
        return shared
    return Experts(
        count=count,
        size=fields.whole("intermediate_size"),
        router=Router(kind="top_softmax", top_k=fields.whole("num_experts_per_tok", 2)),
        activation=decoders.activation(fields),
        shared=shared,
    )


GRANITE = decoders.decoder_family(
    ("GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", _HYBRID, _CLOVA),
    parse,
    renamed={
        ".experts.gate_up_proj": ".input_linear.weight",
        ".experts.down_proj": ".output_linear.weight",
        ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
    },
)
