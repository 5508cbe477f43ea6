"""The dense decoder that Llama, Mistral, Qwen2 and Qwen3 share: its configuration, and the names of its tensors.

What cannot be supported is refused, never ignored.
"""

from typing import Literal, NamedTuple

from penstock.core.checkpoint.families.family import Family, Shape
from penstock.core.checkpoint.families.rope import RopeConfig, parse_rope
from penstock.core.checkpoint.json_fields import JsonFields
from penstock.core.checkpoint.model_config import ModelConfig
from penstock.core.config.options import ConfigError

_MAX_LAYERS = 4096
"""Far more than any real model. What config.json claims costs memory before the first missing weight is noticed."""

Activation = Literal["silu", "gelu", "gelu_tanh"]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class _Variant(NamedTuple):
    """An architecture's special features, and the defaults of transformers for fields missing in config.json."""

    num_kv_heads: int | None = None  # None: one for each query head
    head_dim: int | None = None  # None: hidden_size over the query heads
    max_len: int = 2048
    qkv_bias: bool = False  # always; else
    attention_bias: bool = False  # whether config.json may ask for biases of q, k, v and o
    mlp_bias: bool = False  # whether config.json may ask for biases of the MLP
    qk_norm: bool = False
    windows: Literal["none", "all", "some"] = "none"  # which layers a sliding window may have


_VARIANTS = {
    "LlamaForCausalLM": _Variant(attention_bias=True, mlp_bias=True),
    "MistralForCausalLM": _Variant(num_kv_heads=8, max_len=131072, windows="all"),
    "Qwen2ForCausalLM": _Variant(num_kv_heads=32, qkv_bias=True, windows="some"),
    "Qwen3ForCausalLM": _Variant(num_kv_heads=32, head_dim=128, attention_bias=True, qk_norm=True, windows="some"),
}


class DenseConfig(ModelConfig, frozen=True, kw_only=True):
    """A dense decoder."""

    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    activation: Activation
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool

    @property
    def num_step_weights(self) -> int:
        """Weights of the matrices that a decode step reads: all but a separate embedding."""
        attention = (2 * self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (attention + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size


def parse(architecture: str, fields: JsonFields) -> DenseConfig:
    """Like `Family.parse`, for the architectures of this family."""
    variant = _VARIANTS[architecture]
    hidden_size, num_q_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    num_layers = fields.whole("num_hidden_layers", most=_MAX_LAYERS)
    num_kv_heads = fields.whole("num_key_value_heads", variant.num_kv_heads or num_q_heads)
    if num_q_heads % num_kv_heads:
        raise ConfigError(f"{num_q_heads} attention heads cannot share {num_kv_heads} key-value heads")
    head_dim = fields.whole("head_dim", variant.head_dim or hidden_size // num_q_heads)
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd: rotary embedding needs pairs")
    activation = fields.text("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"hidden_act {activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    trained_len = fields.whole("max_position_embeddings", variant.max_len)
    rope, max_model_len = parse_rope(fields, trained_len, head_dim)
    attention_bias = fields.flag("attention_bias") and variant.attention_bias
    dtype = fields.text("dtype") or fields.text("torch_dtype") or "float32"
    return DenseConfig(
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
        windows=_windows(fields, variant.windows, num_layers),
        qkv_bias=attention_bias or variant.qkv_bias,
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias") and variant.mlp_bias,
        qk_norm=variant.qk_norm,
        tied_embeddings=fields.flag("tie_word_embeddings"),
        checkpoint_dtype=dtype.removeprefix("torch."),
    )


def _windows(fields: JsonFields, kind: Literal["none", "all", "some"], num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window."""
    is_absent = not fields.has("sliding_window")  # null means no window
    default = 4096 if is_absent else None
    if kind == "none" or (fields.raw("sliding_window") is None and default is None):
        return (None,) * num_layers
    window = fields.whole("sliding_window", default)
    if kind == "all":
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


def tensors(config: DenseConfig) -> dict[str, Shape]:
    """Every tensor that the checkpoint must have, with its shape."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

    def linear(name: str, out_size: int, in_size: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out_size, in_size)
        if bias:
            shapes[f"{name}.bias"] = (out_size,)

    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        linear(f"{layer}.self_attn.q_proj", q_size, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv_size, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv_size, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, q_size, config.o_bias)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        linear(f"{layer}.mlp.gate_proj", inner, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.up_proj", inner, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, inner, config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def ignores(name: str, config: DenseConfig) -> bool:
    """Whether a checkpoint's tensor is known to be redundant: a saved rotary buffer, a tied output matrix."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_embeddings)


DENSE = Family(tuple(_VARIANTS), parse, tensors, ignores, build="penstock.gpu_worker.models.dense_build:build")
