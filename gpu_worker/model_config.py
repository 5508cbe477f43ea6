"""A checkpoint's config.json, read into frozen structs that say only what the model needs.

Both spellings of the rotary settings are understood: `rope_theta` with `rope_scaling` (transformers 4)
and `rope_parameters` (transformers 5). What cannot be honoured is refused, never ignored.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from penstock.core.config import ConfigError

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

CLOCKWORK: Architecture = "ClockworkForCausalLM"
"""For tests (see `models/clockwork.py`)."""

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
        ConfigError: for an architecture or a setting that this engine does not have.
    """
    architecture = _architecture(raw)
    hidden_size, num_q_heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    num_layers = _positive(raw, "num_hidden_layers", most=_MAX_LAYERS)
    num_kv_heads = _positive(raw, "num_key_value_heads", _DEFAULT_KV_HEADS.get(architecture, num_q_heads))
    if num_q_heads % num_kv_heads:
        raise ConfigError(f"{num_q_heads} attention heads cannot share {num_kv_heads} key-value heads")
    default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_q_heads
    head_dim = _positive(raw, "head_dim", default_head_dim)
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd: rotary embedding needs pairs")
    activation = raw.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"hidden_act {activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    trained_len = _positive(raw, "max_position_embeddings", 131072 if architecture == "MistralForCausalLM" else 2048)
    rope, max_model_len = _rope(raw, trained_len, head_dim)
    attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and bool(raw.get("attention_bias"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=_ACTIVATIONS[activation],
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        max_model_len=max_model_len,
        windows=_windows(raw, architecture, num_layers),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(raw.get("mlp_bias")),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        checkpoint_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _architecture(raw: Mapping[str, Any]) -> Architecture:
    if raw.get("auto_map"):
        raise ConfigError("this checkpoint brings its own Python code (auto_map), and remote code is never run")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ConfigError(f"this checkpoint is quantized ({method}), and quantized weights are not supported")
    named = raw.get("architectures") or []
    for architecture in (*ARCHITECTURES, CLOCKWORK):
        if named and named[0] == architecture:
            return architecture
    found = ", ".join(map(str, named)) or "none named"
    raise ConfigError(f"architecture {found} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _positive(raw: Mapping[str, Any], key: str, default: int | None = None, most: int = 1 << 30) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"config.json: {key} must be a positive integer up to {most}, got {str(raw.get(key))[:64]}")
    return value


def _windows(raw: Mapping[str, Any], architecture: Architecture, num_layers: int) -> tuple[int | None, ...]:
    """Mistral has one window for all layers, Qwen2 and Qwen3 one for some of them, Llama none."""
    default = 4096 if architecture != "LlamaForCausalLM" else None
    window = raw.get("sliding_window", default)
    if architecture == "LlamaForCausalLM" or window is None:
        return (None,) * num_layers
    if not isinstance(window, int) or window < 1:
        raise ConfigError(f"config.json: sliding_window must be a positive integer, got {window!r}")
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if i >= first else None for i in range(num_layers))
    if len(layer_types) != num_layers or any(t not in ("full_attention", "sliding_attention") for t in layer_types):
        raise ConfigError(f"config.json: layer_types must name full_attention or sliding_attention {num_layers} times")
    return tuple(window if t == "sliding_attention" else None for t in layer_types)


def _rope(raw: Mapping[str, Any], trained_len: int, head_dim: int) -> tuple[RopeConfig, int]:
    """The rotary settings, and the longest sequence that they allow."""
    settings: dict[str, Any] = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in settings.values()):
        raise ConfigError("config.json: rotary settings per layer type are not supported")
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    partial = settings.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial is not None and partial != 1.0:
        raise ConfigError(f"config.json: partial_rotary_factor {partial} is not supported for these architectures")
    theta = float(settings.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    original = raw.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    original = original if original and kind in ("llama3", "yarn") else trained_len
    if kind == "default":
        return RopeConfig(kind="default", theta=theta, original_max_len=trained_len), trained_len
    factor = settings.get("factor")
    if factor is None and kind == "yarn":
        factor = trained_len / original
    if not isinstance(factor, int | float) or factor <= 0:
        raise ConfigError(f"config.json: rope type {kind!r} needs a positive factor, got {factor!r}")
    scaled = RopeConfig(kind=kind, theta=theta, original_max_len=int(original), factor=float(factor))
    match kind:
        case "linear":
            return scaled, trained_len
        case "dynamic":
            if head_dim <= 2:
                raise ConfigError(f"head_dim {head_dim} is too small for dynamic rotary scaling")
            return scaled, int(trained_len * factor)
        case "llama3":
            low, high = settings.get("low_freq_factor"), settings.get("high_freq_factor")
            if not isinstance(low, int | float) or not isinstance(high, int | float) or high <= low:
                raise ConfigError("config.json: rope type 'llama3' needs low_freq_factor < high_freq_factor")
            rope = replace(scaled, low_freq_factor=float(low), high_freq_factor=float(high))
            return rope, trained_len
        case _:
            rope = replace(
                scaled,
                beta_fast=float(settings.get("beta_fast") or 32),
                beta_slow=float(settings.get("beta_slow") or 1),
                truncate=bool(settings.get("truncate", True)),
                attention_factor=_yarn_attention_factor(settings, float(factor)),
            )
            return rope, max(trained_len, int(original * factor))


def _yarn_attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    """Peng et al., 2023, equation 22, with the mscale settings that DeepSeek added."""
    given = settings.get("attention_factor")
    if given is not None:
        return float(given)

    def of(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return of(float(mscale)) / of(float(mscale_all_dim))
    return of(1.0)
