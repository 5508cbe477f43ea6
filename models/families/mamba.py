"""Mamba and Falcon Mamba: Mamba 1 alone, no attention, no MLPs, no positions."""

from penstock.models.description.decoder import Decoder, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.description.recurrent import Mamba1
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.recurrent import LONGEST, conv_width, dt_rank, needs_silu

_FALCON = "FalconMambaForCausalLM"
_NAMES = Names(
    embedding="backbone.embeddings",
    layer="backbone.layers.{}.",
    final_norm="backbone.norm_f",
    mixer_norm="norm",
    recurrent_in=("mixer.in_proj",),
    recurrent_conv=("mixer.conv1d",),
    recurrent_gates=("mixer.x_proj",),
    recurrent_gate_norms=("mixer.dt_layernorm", "mixer.b_layernorm", "mixer.c_layernorm"),
    recurrent_steps="mixer.dt_proj",
    recurrent_out="mixer.out_proj",
    a_log="mixer.A_log",
    dt_bias="mixer.dt_proj.bias",
    skip="mixer.D",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    needs_silu(fields)
    norm = Norm(eps=fields.number("layer_norm_epsilon", 1e-5))
    mixer = Mamba1(
        inner=fields.whole("intermediate_size", fields.whole("expand", 2) * fields.whole("hidden_size", 768)),
        state_size=fields.whole("state_size", 16),
        dt_rank=dt_rank(fields, "time_step_rank"),
        conv_width=conv_width(fields, "conv_kernel", 4),
        conv_bias=fields.flag("use_conv_bias", True),
        has_bias=fields.flag("use_bias"),
        norm_eps=fields.number("mixer_rms_eps", 1e-6) if architecture == _FALCON else None,
        norms_have_weights=False,
    )
    layers = [Layer(mixer_norm=norm, mixer=mixer, mlp=None)] * decoders.num_layers(fields)
    return decoders.decoder(architecture, fields, layers, norm, LONGEST, _NAMES, is_tied=True)


MAMBA = decoders.decoder_family(
    ("MambaForCausalLM", _FALCON), parse, renamed={"backbone.embedding.": "backbone.embeddings."}
)
