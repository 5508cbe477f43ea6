"""Falcon-H1: attention and Mamba 2 side by side in each layer, with many multipliers."""

from msgspec.structs import replace

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm, SideBySide
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.family import NotDescribed
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.recurrent import mamba2
from penstock.models.parsing.rope import parse_rope

_NAMES = Names(
    final_norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`."""
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-5))
    its = decoders.attention(fields, num_kv_heads=8, has_bias=fields.flag("attention_bias"))
    rope, max_model_len = parse_rope(fields, fields.whole("max_position_embeddings", 8192), its.head_dim)
    x, keys = fields.number("attention_in_multiplier", 1.0), fields.number("key_multiplier", 1.0)
    of_scan_input = fields.number("ssm_in_multiplier", 1.0)
    inner = fields.whole("mamba_d_ssm", 1024)
    if fields.has("mamba_d_ssm") and fields.raw("mamba_d_ssm") is None:
        inner = fields.whole("mamba_expand", 2) * fields.whole("hidden_size")
    scan = mamba2(fields, 128, norm.eps, inner)
    if (its.qkv_bias and (x, keys) != (1.0, 1.0)) or scan.has_bias or fields.flag("projectors_bias"):
        raise NotDescribed("config.json: biases of projections whose inputs have multipliers are not supported")
    scales = _numbers(fields, "ssm_multipliers", 5)
    has_norm = fields.flag("mamba_rms_norm")
    gate_scale, out_scale = _numbers(fields, "mlp_multipliers", 2)
    layer = Layer(
        mixer_norm=norm,
        mixer=SideBySide(
            # Queries, keys and values are linear in the multiplied input.
            attention=replace(its, rope=rope, scale=its.scale * x * x * keys),
            attention_scale=fields.number("attention_out_multiplier", 1.0) * x,
            recurrent=replace(
                scan,
                norm_eps=norm.eps if has_norm else None,
                norm_precedes_gate=has_norm and fields.flag("mamba_norm_before_gate", True),
                in_scales=tuple(scale * of_scan_input for scale in scales),
            ),
            recurrent_scale=fields.number("ssm_out_multiplier", 1.0),
        ),
        mlp_norm=norm,
        mlp=DenseMLP(
            size=fields.whole("intermediate_size", 14336),
            activation=decoders.activation(fields),
            has_bias=fields.flag("mlp_bias"),
            gate_scale=gate_scale,
            out_scale=out_scale,
        ),
    )
    layers = [layer] * decoders.num_layers(fields)
    return replace(
        decoders.decoder(architecture, fields, layers, norm, max_model_len, _NAMES),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=fields.number("lm_head_multiplier", 1.0),
    )


def _numbers(fields: JsonFields, name: str, count: int) -> tuple[float, ...]:
    numbers = fields.numbers(name) or (1.0,) * count
    if len(numbers) != count:
        raise ConfigError(f"config.json: {name} must be {count} numbers, got {len(numbers)}")
    return numbers


FALCON_H1 = decoders.decoder_family(("FalconH1ForCausalLM",), parse)
