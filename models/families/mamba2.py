"""Mamba 2 alone: no attention, no MLPs, no positions."""

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Decoder, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.description.recurrent import Mamba2
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.recurrent import LONGEST, conv_width, dt_limits, needs_silu, refuse_groups

_NAMES = Names(
    embedding="backbone.embeddings",
    layer="backbone.layers.{}.",
    final_norm="backbone.norm_f",
    mixer_norm="norm",
    recurrent_in=("mixer.in_proj",),
    recurrent_conv=("mixer.conv1d",),
    recurrent_norm="mixer.norm",
    recurrent_out="mixer.out_proj",
    a_log="mixer.A_log",
    dt_bias="mixer.dt_bias",
    skip="mixer.D",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    needs_silu(fields)
    norm = Norm(eps=fields.number("layer_norm_epsilon", 1e-5))
    num_heads, head_dim = fields.whole("num_heads", 128), fields.whole("head_dim", 64)
    num_groups, inner = fields.whole("n_groups", 8), fields.whole("expand", 2) * fields.whole("hidden_size", 4096)
    if num_heads * head_dim != inner:
        raise ConfigError(
            f"config.json: {num_heads} heads of {head_dim} numbers do not make expand * hidden_size, {inner}"
        )
    refuse_groups("num_heads", num_heads, "n_groups", num_groups)
    least, most = dt_limits(fields)
    mixer = Mamba2(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=fields.whole("state_size", 128),
        conv_width=conv_width(fields, "conv_kernel", 4),
        conv_bias=fields.flag("use_conv_bias", True),
        has_bias=fields.flag("use_bias"),
        norm_eps=norm.eps,
        norm_groups=num_groups,
        min_dt=least,
        max_dt=most,
    )
    layers = [Layer(mixer_norm=norm, mixer=mixer, mlp=None)] * decoders.num_layers(fields)
    return decoders.decoder(architecture, fields, layers, norm, LONGEST, _NAMES)


MAMBA2 = decoders.decoder_family(("Mamba2ForCausalLM",), parse)
