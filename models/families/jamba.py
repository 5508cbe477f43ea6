"""Jamba: Mamba 1 in most layers, attention without positions in some; dense MLPs and mixtures of experts alternate."""

from msgspec.structs import replace

from penstock.models.description.decoder import Decoder, DenseMLP, Experts, Layer, Norm, Router
from penstock.models.description.names import Names
from penstock.models.description.recurrent import Mamba1
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.recurrent import conv_width, dt_rank, needs_silu

_NAMES = Names(
    final_norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    recurrent_gates=("mamba.x_proj",),
    recurrent_gate_norms=("mamba.dt_layernorm", "mamba.b_layernorm", "mamba.c_layernorm"),
    recurrent_steps="mamba.dt_proj",
    dt_bias="mamba.dt_proj.bias",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    router="feed_forward.router",
    expert_gate_up=("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
    expert_down="feed_forward.experts.{}.down_proj",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    needs_silu(fields)  # of convolutions, too
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-6))
    size = fields.whole("intermediate_size", 14336)
    dense, count = DenseMLP(size=size), fields.whole("num_experts", fields.whole("num_local_experts", 16))
    experts = Experts(count=count, size=size, router=Router(top_k=fields.whole("num_experts_per_tok", 2)))
    attention = Layer(mixer_norm=norm, mixer=decoders.attention(fields, num_kv_heads=8), mlp_norm=norm, mlp=dense)
    mixer = Mamba1(
        inner=fields.whole("mamba_expand", 2) * fields.whole("hidden_size", 4096),
        state_size=fields.whole("mamba_d_state", 16),
        dt_rank=dt_rank(fields, "mamba_dt_rank"),
        conv_width=conv_width(fields, "mamba_d_conv", 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        has_bias=fields.flag("mamba_proj_bias"),
        norm_eps=norm.eps,
    )
    recurrent = replace(attention, mixer=mixer)
    with_attention, with_experts = _places(fields, "attn_layer", 8, 4), _places(fields, "expert_layer", 2, 1)
    layers = []
    for i in range(decoders.num_layers(fields)):
        layer = attention if i % with_attention[0] == with_attention[1] else recurrent
        is_mixture = count > 1 and i % with_experts[0] == with_experts[1]
        layers.append(replace(layer, mlp=experts) if is_mixture else layer)
    max_model_len = fields.whole("max_position_embeddings", 262144)
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, _NAMES)


def _places(fields: JsonFields, name: str, period: int, offset: int) -> tuple[int, int]:
    """Return how many layers apart the layers of a kind are, and the first one."""
    return fields.whole(f"{name}_period", period), fields.whole(f"{name}_offset", offset, least=0)


JAMBA = decoders.decoder_family(("JambaForCausalLM",), parse)
