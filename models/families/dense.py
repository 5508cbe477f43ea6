"""The dense decoder of Llama, Mistral, Qwen2 and Qwen3. Unsupported settings are refused, never ignored."""

from typing import Literal, NamedTuple

from msgspec.structs import replace

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Decoder, DenseMLP, Layer, Norm
from penstock.models.parsing import decoders
from penstock.models.parsing.encoders import CLASSIFIES, num_classes
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope


class _Variant(NamedTuple):
    """An architecture's special features, and the defaults of transformers for fields missing in config.json."""

    num_kv_heads: int | None = None  # None: one per query head
    head_dim: int | None = None  # None: hidden_size divided by the query heads
    max_len: int = 2048
    qkv_bias: bool = False  # always; otherwise see the next field
    attention_bias: bool = False  # whether config.json may ask for biases of q, k, v and o
    mlp_bias: bool = False  # whether config.json may ask for biases of the MLP
    qk_norm: bool = False
    windows: Literal["none", "all", "some"] = "none"  # which layers may have a sliding window


_VARIANTS = {
    "LlamaForCausalLM": _Variant(attention_bias=True, mlp_bias=True),
    "MistralForCausalLM": _Variant(num_kv_heads=8, max_len=131072, windows="all"),
    "Qwen2ForCausalLM": _Variant(num_kv_heads=32, max_len=32768, qkv_bias=True, windows="some"),
    "Qwen3ForCausalLM": _Variant(
        num_kv_heads=32, head_dim=128, max_len=32768, attention_bias=True, qk_norm=True, windows="some"
    ),
}


def parse(architecture: str, fields: JsonFields) -> Decoder:
    """Like `Family.parse`, for the architectures of this family, and their forms without a head for tokens."""
    for end in (CLASSIFIES, "Model"):
        if architecture.endswith(end):
            decoder = _parse(architecture.removesuffix(end) + "ForCausalLM", fields)
            classes = num_classes(fields) if end == CLASSIFIES else 0
            # The embedding stands in for the matrix of logits, which are never computed.
            return replace(
                decoder, architecture=architecture, tied_embeddings=True, draws_tokens=False, num_classes=classes
            )
    return _parse(architecture, fields)


def _parse(architecture: str, fields: JsonFields) -> Decoder:
    variant = _VARIANTS[architecture]
    attention = decoders.attention(fields, variant.num_kv_heads, variant.head_dim)
    rope, max_model_len = parse_rope(
        fields, fields.whole("max_position_embeddings", variant.max_len), attention.head_dim
    )
    if rope.dim != attention.head_dim:
        raise ConfigError("config.json: partial_rotary_factor is not supported for these architectures")
    attention_bias = fields.flag("attention_bias") and variant.attention_bias
    norm = Norm(eps=fields.number("rms_norm_eps", 1e-6))
    mlp = DenseMLP(
        size=fields.whole("intermediate_size"),
        activation=decoders.activation(fields),
        has_bias=fields.flag("mlp_bias") and variant.mlp_bias,
    )

    qk_norm = norm if variant.qk_norm else None
    mixer = replace(
        attention,
        qkv_bias=attention_bias or variant.qkv_bias,
        o_bias=attention_bias,
        q_norm=qk_norm,
        k_norm=qk_norm,
        rope=rope,
    )
    layers = [
        Layer(mixer_norm=norm, mixer=replace(mixer, window=window), mlp_norm=norm, mlp=mlp)
        for window in _windows(fields, variant.windows, decoders.num_layers(fields))
    ]
    return decoders.decoder(architecture, fields, layers, norm, max_model_len)


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
    first = fields.whole("max_window_layers", 28, least=0)
    by_place = ["full_attention"] * min(first, num_layers) + ["sliding_attention"] * (num_layers - first)
    kinds = decoders.layer_types(fields, num_layers, by_place)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_STARTS = [architecture.removesuffix("ForCausalLM") for architecture in _VARIANTS]
DENSE = decoders.decoder_family(tuple(_VARIANTS), parse, base="model.")
DENSE_POOLED = decoders.decoder_family(
    [start + end for start in _STARTS for end in (CLASSIFIES, "Model")], parse, base="model."
)
