"""Nemotron-H: each layer is one of Mamba 2, attention without positions, an MLP, or experts, behind a norm."""

from msgspec.structs import replace

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Decoder, DenseMLP, Experts, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.description.recurrent import Mamba2
from penstock.models.parsing import decoders
from penstock.models.parsing.family import NotDescribed
from penstock.models.parsing.json_fields import JsonFields, shown
from penstock.models.parsing.recurrent import conv_width, refuse_groups

_NAMES = Names(
    embedding="backbone.embeddings",
    layer="backbone.layers.{}.",
    final_norm="backbone.norm_f",
    mixer_norm="norm",
    mlp_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o="mixer.o_proj",
    recurrent_in=("mixer.in_proj",),
    recurrent_conv=("mixer.conv1d",),
    recurrent_norm="mixer.norm",
    recurrent_out="mixer.out_proj",
    a_log="mixer.A_log",
    dt_bias="mixer.dt_bias",
    skip="mixer.D",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    router="mixer.gate",
    correction="mixer.gate.e_score_correction_bias",
    expert_gate_up=("mixer.experts.{}.up_proj",),
    expert_down="mixer.experts.{}.down_proj",
    shared_gate_up=("mixer.shared_experts.up_proj",),
    shared_down="mixer.shared_experts.down_proj",
    unused=("mtp.",),
)
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_KINDS = {**{kind: kind for kind in _LETTERS.values()}, "mamba": "linear_attention", "attention": "full_attention"}


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    norm = Norm(eps=fields.number("layer_norm_epsilon", 1e-5))
    attention = decoders.attention(fields, num_kv_heads=8, head_dim=128)
    if fields.raw("head_dim") is None:
        attention = replace(attention, head_dim=128, scale=128**-0.5)
    mlp = DenseMLP(
        size=fields.whole("intermediate_size", 21504),
        activation=decoders.activation(fields, "mlp_hidden_act", "relu2"),
        is_gated=False,
        has_bias=fields.flag("mlp_bias"),
    )
    of_kind = {
        "linear_attention": Layer(mixer_norm=norm, mixer=_mamba(fields, norm.eps), mlp=None),
        "full_attention": Layer(mixer_norm=norm, mixer=attention, mlp=None),
        "mlp": Layer(mixer=None, mlp_norm=norm, mlp=mlp),
    }
    kinds = _kinds(fields)
    if "moe" in kinds:
        of_kind["moe"] = Layer(mixer=None, mlp_norm=norm, mlp=_experts(fields, mlp))
    layers = [of_kind[kind] for kind in kinds]
    max_model_len = fields.whole("max_position_embeddings", 4096)
    return decoders.decoder(architecture, fields, layers, norm, max_model_len, _NAMES)


def _kinds(fields: JsonFields) -> list[str]:
    types = fields.texts("layer_types") or fields.texts("layers_block_type")
    if types is None:
        types = [_LETTERS.get(letter, letter) for letter in fields.text("hybrid_override_pattern")]
    kinds = [_KINDS.get(kind, "") for kind in types]
    if not 0 < len(kinds) <= decoders.MAX_LAYERS or not all(kinds):
        raise ConfigError(
            f"config.json: layer_types must name one of {', '.join(_KINDS)} for each layer, got "
            f"{', '.join(sorted(set(map(shown, types)))[:4]) or 'nothing'}"
        )
    return kinds


def _experts(fields: JsonFields, mlp: DenseMLP) -> Experts:
    if fields.raw("moe_latent_size") is not None:
        raise NotDescribed("config.json: moe_latent_size, experts between projections, is not supported")
    return Experts(
        count=fields.whole("n_routed_experts", 8),
        size=fields.whole("moe_intermediate_size", 7688),
        router=decoders.sigmoid_router(fields, top_k=2),
        activation=mlp.activation,
        is_gated=False,
        shared=replace(mlp, size=fields.whole("moe_shared_expert_intermediate_size", 7688)),
    )


def _mamba(fields: JsonFields, norm_eps: float) -> Mamba2:
    num_heads, num_groups = fields.whole("mamba_num_heads", 128), fields.whole("n_groups", 8)
    refuse_groups("mamba_num_heads", num_heads, "n_groups", num_groups)
    return Mamba2(
        num_heads=num_heads,
        head_dim=fields.whole("mamba_head_dim", 64),
        num_groups=num_groups,
        state_size=fields.whole("ssm_state_size", 128),
        conv_width=conv_width(fields, "conv_kernel", 4),
        conv_bias=fields.flag("use_conv_bias", True),
        has_bias=fields.flag("use_bias"),
        norm_eps=norm_eps,
        norm_groups=num_groups,
        min_dt=fields.number("time_step_min", 0.001),
    )


NEMOTRON_H = decoders.decoder_family(("NemotronHForCausalLM",), parse, renamed={"model.": "backbone."})
