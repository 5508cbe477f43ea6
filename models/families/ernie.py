"""Ernie 4.5, dense and with experts: neighbours are rotated together; all tokens go through a shared expert."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Experts, Layer, Norm, Router
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope

_NAMES = Names(correction="mlp.moe_statics.e_score_correction_bias", correction_is_row=True)
_MIXTURE = "Ernie4_5_MoeForCausalLM"


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """As `Family.parse`."""
    num_layers = decoders.num_layers(fields)
    is_mixture = architecture == _MIXTURE
    has_bias = fields.flag("use_bias")
    attention = decoders.attention(fields, 4 if is_mixture else 2, None if is_mixture else 128, has_bias)
    trained_len = fields.whole("max_position_embeddings", 131072)
    rope, max_model_len = parse_rope(fields, trained_len, attention.head_dim, theta=500000.0, is_interleaved=True)
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-5))
    mixer = replace(attention, rope=rope)
    dense = DenseMLP(size=fields.whole("intermediate_size"), activation=decoders.activation(fields), has_bias=has_bias)
    mlps: list[DenseMLP | Experts] = [dense] * num_layers
    if is_mixture:
        _put_experts(mlps, fields, has_bias)
    layers = [Layer(mixer_norm=norm, mixer=mixer, mlp_norm=norm, mlp=mlp) for mlp in mlps]
    decoder = decoders.decoder(architecture, fields, layers, norm, max_model_len, _NAMES, is_tied=True)
    return replace(decoder, head_bias=has_bias and is_mixture)


def _put_experts(mlps: list[DenseMLP | Experts], fields: JsonFields, has_bias: bool) -> None:
    """Put experts in every n-th layer of a range."""
    size, num_shared = fields.whole("moe_intermediate_size", 1536), fields.whole("moe_num_shared_experts", 2, least=0)
    activation = decoders.activation(fields)
    experts = Experts(
        count=fields.whole("moe_num_experts", 64),
        size=size,
        router=Router(top_k=fields.whole("moe_k", 6), renormalize=True, has_correction=True),
        activation=activation,
        shared=DenseMLP(size=size * num_shared, activation=activation, has_bias=has_bias) if num_shared else None,
    )
    first, last = fields.whole("moe_layer_start_index", 1, least=0), fields.whole("moe_layer_end_index", -1, least=-1)
    every = fields.whole("moe_layer_interval", 1)
    for i in range(first, len(mlps) if last == -1 else min(last + 1, len(mlps))):
        if (i + 1) % every == 0:
            mlps[i] = experts


ERNIE = decoders.decoder_family(
    ["Ernie4_5ForCausalLM", _MIXTURE], parse, renamed={".mlp.gate.moe_statics.": ".mlp.moe_statics."}
)
