"""A checkpoint's config.json, read into frozen structs that say only what the model needs.

Both spellings of the rotary settings are understood: `rope_theta` with `rope_scaling` (transformers 4)
and `rope_parameters` (transformers 5). What cannot be honoured is refused, never ignored.
"""

import math
import os
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from penstock.core.checkpoint.json_fields import JsonFields
from penstock.core.config.options import ConfigError

Architecture = Literal[
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "ClockworkForCausalLM"
]
ARCHITECTURES: tuple[Architecture, ...] = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)

_MAX_LAYERS = 4096
"""Far more than anybody trains. What a config.json claims costs memory before the first weight is missed."""

_MAX_ROPE_FACTOR = 4096.0

CLOCKWORK: Architecture = "ClockworkForCausalLM"
TEST_MODELS_VARIABLE = "PENSTOCK_TEST_MODELS"
"""Models for tests (`gpu_worker/models/clockwork.py`) are served only where this variable is set: no checkpoint can
ask for one by itself."""

_OTHER_SENSES = ("vision_config", "audio_config", "image_token_id", "image_token_index")

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
Activation = Literal["silu", "gelu", "gelu_tanh"]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


_DEFAULT_KV_HEADS: dict[Architecture, int] = {
    "MistralForCausalLM": 8,
    "Qwen2ForCausalLM": 32,
    "Qwen3ForCausalLM": 32,
}
"""What transformers takes where config.json does not say; Llama's default is one per query head."""


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How positions rotate q and k; fields that a kind does not use keep their defaults."""

    kind: RopeKind
    theta: float
    original_max_len: int  # trained length: llama3, yarn and dynamic scale against it
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # multiplies cosines and sines; resolved from mscale for yarn


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A dense decoder."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    activation: Activation
    rms_norm_eps: float
    rope: RopeConfig
    max_model_len: int  # what positions allow, with the rotary scaling
    windows: tuple[int | None, ...]  # per layer
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    checkpoint_dtype: str  # torch's name, as "bfloat16"

    @property
    def num_step_weights(self) -> int:
        """Weights of the matrices that a decode step reads: all but an embedding of its own."""
        attention = (2 * self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (attention + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read config.json's object.

    Raises:
        ConfigError: for an architecture or a setting that this engine does not have, or a field of a wrong type.
    """
    fields = JsonFields("config.json", raw)
    architecture = _architecture(fields)
    hidden_size, num_q_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    num_layers = fields.whole("num_hidden_layers", most=_MAX_LAYERS)
    num_kv_heads = fields.whole("num_key_value_heads", _DEFAULT_KV_HEADS.get(architecture, num_q_heads))
    if num_q_heads % num_kv_heads:
        raise ConfigError(f"{num_q_heads} attention heads cannot share {num_kv_heads} key-value heads")
    default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_q_heads
    head_dim = fields.whole("head_dim", default_head_dim)
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd: rotary embedding needs pairs")
    activation = fields.text("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"hidden_act {activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    trained_len = fields.whole("max_position_embeddings", 131072 if architecture == "MistralForCausalLM" else 2048)
    rope, max_model_len = _rope(fields, trained_len, head_dim)
    attention_bias = fields.flag("attention_bias") and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    dtype = fields.text("dtype") or fields.text("torch_dtype") or "float32"
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=_ACTIVATIONS[activation],
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_model_len=max_model_len,
        windows=_windows(fields, architecture, num_layers),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias") and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        tied_embeddings=fields.flag("tie_word_embeddings"),
        checkpoint_dtype=dtype.removeprefix("torch."),
    )


def _architecture(fields: JsonFields) -> Architecture:
    if fields.raw("auto_map"):
        raise ConfigError("this checkpoint brings its own Python code (auto_map), and remote code is never run")
    if quantization := fields.object("quantization_config"):
        raise quantized(quantization.text("quant_method") or "unknown")
    named = fields.texts("architectures") or []
    for architecture in ARCHITECTURES:
        if named and named[0] == architecture:
            return architecture
    if named and named[0] == CLOCKWORK and os.environ.get(TEST_MODELS_VARIABLE):
        return CLOCKWORK
    found = ", ".join(named)[:256] or "none named"
    of_pictures = " (it takes images or sound; models of text alone are served)"
    hint = of_pictures if any(fields.raw(name) for name in _OTHER_SENSES) else ""
    raise ConfigError(f"architecture {found} is not supported{hint}; supported: {', '.join(ARCHITECTURES)}")


def quantized(method: str) -> ConfigError:
    """What to say of weights in a format that is not there."""
    return ConfigError(
        f"this checkpoint is quantized ({method[:64]}), and quantized weights are not supported yet: "
        "serve the one that it was made from, in bfloat16, float16 or float32"
    )


def _windows(fields: JsonFields, architecture: Architecture, num_layers: int) -> tuple[int | None, ...]:
    """Mistral has one window for all layers, Qwen2 and Qwen3 one for some of them, Llama none."""
    is_absent = not fields.has("sliding_window")  # null means that there is none
    default = 4096 if architecture != "LlamaForCausalLM" and is_absent else None
    if architecture == "LlamaForCausalLM" or (fields.raw("sliding_window") is None and default is None):
        return (None,) * num_layers
    window = fields.whole("sliding_window", default)
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not fields.flag("use_sliding_window"):
        return (None,) * num_layers
    layer_types = fields.texts("layer_types")
    if layer_types is None:
        first = fields.whole("max_window_layers", 28, least=0)
        return tuple(window if i >= first else None for i in range(num_layers))
    if len(layer_types) != num_layers or any(t not in ("full_attention", "sliding_attention") for t in layer_types):
        raise ConfigError(f"config.json: layer_types must name full_attention or sliding_attention {num_layers} times")
    return tuple(window if t == "sliding_attention" else None for t in layer_types)


def _rope(fields: JsonFields, trained_len: int, head_dim: int) -> tuple[RopeConfig, int]:
    """The rotary settings, and the longest sequence that they allow."""
    none = JsonFields("config.json", {})
    settings = fields.object("rope_scaling") or fields.object("rope_parameters") or none
    if settings.has_objects():
        raise ConfigError("config.json: rotary settings per layer type are not supported")
    name = settings.text("rope_type") or settings.text("type") or "default"
    kind = next((kind for kind in ROPE_KINDS if kind == name), None)
    if kind is None:
        raise ConfigError(f"rope type {name[:64]!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    partial = settings.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(f"config.json: partial_rotary_factor {partial} is not supported for these architectures")
    theta = settings.number("rope_theta", 0.0) or fields.number("rope_theta", 0.0) or 10000.0
    original = trained_len
    if kind in ("llama3", "yarn"):
        within = settings.whole("original_max_position_embeddings", trained_len)
        original = fields.whole("original_max_position_embeddings", within)
    if kind == "default":
        return RopeConfig(kind="default", theta=theta, original_max_len=trained_len), trained_len
    factor = settings.number("factor", trained_len / original if kind == "yarn" else 0.0)
    if not 0 < factor <= _MAX_ROPE_FACTOR:
        raise ConfigError(f"config.json: rope type {kind!r} needs a positive factor, got {settings.raw('factor')}")
    scaled = RopeConfig(kind=kind, theta=theta, original_max_len=original, factor=factor)
    match kind:
        case "linear":
            return scaled, trained_len
        case "dynamic":
            if head_dim <= 2:
                raise ConfigError(f"head_dim {head_dim} is too small for dynamic rotary scaling")
            return scaled, int(trained_len * factor)
        case "llama3":
            low, high = settings.number("low_freq_factor", 0.0), settings.number("high_freq_factor", 0.0)
            if high <= low:
                raise ConfigError("config.json: rope type 'llama3' needs low_freq_factor < high_freq_factor")
            return replace(scaled, low_freq_factor=low, high_freq_factor=high), trained_len
        case _:
            rope = replace(
                scaled,
                beta_fast=settings.number("beta_fast", 0.0) or 32.0,
                beta_slow=settings.number("beta_slow", 0.0) or 1.0,
                truncate=settings.flag("truncate", True),
                attention_factor=_yarn_attention_factor(settings, factor),
            )
            return rope, max(trained_len, int(original * factor))


def _yarn_attention_factor(settings: JsonFields, factor: float) -> float:
    """Peng et al., 2023, equation 22, with the mscale settings that DeepSeek added."""
    if settings.raw("attention_factor") is not None:
        return settings.number("attention_factor", 1.0)

    def of(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all_dim = settings.number("mscale", 0.0), settings.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return of(mscale) / of(mscale_all_dim)
    return of(1.0)
