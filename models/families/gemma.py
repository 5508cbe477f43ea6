"""Gemma 1, 2 and 3 (text): 1 + w norms, scaled embeddings; from 2 on norms around each part, windows and softcaps."""

from msgspec.structs import replace

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Activation, Decoder, DenseMLP, Layer, Norm
from penstock.models.description.names import Names
from penstock.models.parsing import decoders
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import RopeConfig, parse_rope, rope_settings

_VERSIONS = {"GemmaForCausalLM": 1, "Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 3}

_SANDWICH = Names(
    post_mixer_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """As `Family.parse`."""
    version = _VERSIONS[architecture]
    if fields.flag("use_bidirectional_attention"):
        raise ConfigError("config.json: use_bidirectional_attention is not supported: tokens see only earlier ones")
    num_layers = decoders.num_layers(fields)
    attention = decoders.attention(fields, None if version == 1 else 4, 256, fields.flag("attention_bias"))
    head_dim = attention.head_dim
    trained_len = fields.whole("max_position_embeddings", 131072 if version == 3 else 8192)
    everywhere, in_windows, max_model_len = _ropes(fields, trained_len, head_dim, version)
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-6), offset=1.0)
    qk_norm = norm if version == 3 else None
    mlp = DenseMLP(size=fields.whole("intermediate_size"), activation=_activation(fields, version))

    def layer(window: int | None) -> Layer:
        mixer = replace(
            attention,
            scale=(head_dim if version == 1 else fields.whole("query_pre_attn_scalar", 256)) ** -0.5,
            q_norm=qk_norm,
            k_norm=qk_norm,
            rope=everywhere if window is None else in_windows,
            window=window,
            softcap=decoders.softcap(fields, "attn_logit_softcapping", 50.0) if version == 2 else 0.0,
        )
        after = norm if version > 1 else None
        return Layer(mixer_norm=norm, mixer=mixer, post_mixer_norm=after, mlp_norm=norm, mlp=mlp, post_mlp_norm=after)

    cap = decoders.softcap(fields, "final_logit_softcapping", 30.0 if version == 2 else 0.0) if version > 1 else 0.0
    layers = [layer(window) for window in _windows(fields, num_layers, version)]
    names = _SANDWICH if version > 1 else Names()
    decoder = decoders.decoder(architecture, fields, layers, norm, max_model_len, names, is_tied=True)
    return replace(
        decoder, embedding_scale=decoder.hidden_size**0.5, embedding_scale_is_rounded=True, logit_softcap=cap
    )


def _activation(fields: JsonFields, version: int) -> Activation:
    """Gemma 1 says "gelu" and means its approximation by tanh."""
    found = decoders.activation(fields, "hidden_act" if version == 1 else "hidden_activation", "gelu_pytorch_tanh")
    return "gelu_tanh" if version == 1 and found == "gelu" else found


def _ropes(fields: JsonFields, trained_len: int, head_dim: int, version: int) -> tuple[RopeConfig, RopeConfig, int]:
    """Return the rotation of layers without a window, that of layers with one, and the longest sequence.

    Gemma 3 has two rotations: config.json has settings for each type of layers, or `rope_theta` and `rope_scaling` for
    layers without a window and `rope_local_base_freq` for the others.
    """
    if version < 3:
        rope, max_model_len = parse_rope(fields, trained_len, head_dim)
        return rope, rope, max_model_len
    everywhere, max_model_len = parse_rope(
        fields, trained_len, head_dim, settings=rope_settings(fields, "full_attention"), theta=1e6
    )
    local = rope_settings(fields, "sliding_attention") if fields.object("rope_parameters") else None
    only_theta = JsonFields("config.json", {"rope_theta": fields.number("rope_local_base_freq", 1e4)})
    in_windows, _ = parse_rope(only_theta, trained_len, head_dim, settings=local or only_theta)
    return everywhere, in_windows, max_model_len


def _windows(fields: JsonFields, num_layers: int, version: int) -> tuple[int | None, ...]:
    """Each layer's window: in Gemma 2 every second layer has none, in Gemma 3 every sixth."""
    if version == 1:
        return (None,) * num_layers
    every = 2 if version == 2 else fields.whole("sliding_window_pattern", 6)
    usual = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    return decoders.windows(fields, num_layers, usual, 4096)


GEMMA = decoders.decoder_family(tuple(_VERSIONS), parse)
