"""ModernBERT (Warner et al., 2024): rotated positions, norms before, gated MLPs, windows in most layers."""

from penstock.config.options import ConfigError
from penstock.models.description.decoder import DenseMLP, Norm
from penstock.models.description.encoder import ClassHead, Encoder, EncoderAttention, EncoderLayer, EncoderNames
from penstock.models.parsing import decoders
from penstock.models.parsing.encoders import CLASSIFIES, encoder_family, num_classes
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import RopeConfig, parse_rope

_NAMES = EncoderNames(
    base="model.",
    embedding="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    layer="layers.{}.",
    attention_norm="attn_norm",
    mlp_norm="mlp_norm",
    qkv=("attn.Wqkv",),
    o="attn.Wo",
    gate_up=("mlp.Wi",),
    down="mlp.Wo",
    final_norm="final_norm",
    head_dense="head.dense",
    head_norm="head.norm",
)


def parse(architecture: str, fields: JsonFields) -> Encoder:
    """Like `Family.parse`."""
    hidden_size, num_heads = fields.whole("hidden_size", 768), fields.whole("num_attention_heads", 12)
    if hidden_size % num_heads:
        raise ConfigError(f"config.json: a hidden size of {hidden_size} is no multiple of {num_heads} heads")
    head_dim, has_bias = hidden_size // num_heads, fields.flag("attention_bias")
    norm = Norm(kind="layer", eps=fields.number("norm_eps", 1e-5), has_bias=fields.flag("norm_bias"))
    mlp = DenseMLP(
        size=fields.whole("intermediate_size", 1152),
        activation=decoders.activation(fields, "hidden_activation", "gelu"),
        has_bias=fields.flag("mlp_bias"),
    )
    num_layers = decoders.num_layers(fields)
    interval = fields.whole("global_attn_every_n_layers", 3)
    usual = ["sliding_attention" if i % interval else "full_attention" for i in range(num_layers)]
    reach = fields.whole("local_attention", 128) // 2
    max_len = fields.whole("max_position_embeddings", 8192)
    classifies = architecture.endswith(CLASSIFIES)
    layers = []
    for i, kind in enumerate(decoders.layer_types(fields, num_layers, usual)):
        is_local = kind == "sliding_attention"
        attention = EncoderAttention(
            num_heads=num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            has_bias=has_bias,
            rope=_rope(fields, kind, max_len, head_dim),
            reach=reach if is_local else None,
        )
        layers.append(EncoderLayer(attention=attention, mlp=mlp, has_first_norm=i > 0))
    return Encoder(
        architecture=architecture,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(layers),
        norm=norm,
        norms_are_before=True,
        has_final_norm=True,
        num_classes=num_classes(fields) if classifies else 0,
        head=_head(fields, norm) if classifies else None,
        max_model_len=max_len,
        checkpoint_dtype=decoders.dtype(fields),
        names=_NAMES,
    )


def _rope(fields: JsonFields, kind: str, max_len: int, head_dim: int) -> RopeConfig:
    of_kinds = fields.object("rope_parameters") or JsonFields("config.json", {})
    settings = of_kinds.object(kind) or JsonFields("config.json", {})
    name, usual = ("local", 10_000.0) if kind == "sliding_attention" else ("global", 160_000.0)
    theta = fields.number(f"{name}_rope_theta", usual) or usual
    rope, _ = parse_rope(fields, max_len, head_dim, settings=settings, theta=theta)
    if rope.kind != "default":
        raise ConfigError(f"config.json: rope type {rope.kind!r} is not supported in encoders; supported: default")
    return rope


def _head(fields: JsonFields, norm: Norm) -> ClassHead:
    pooling = fields.text("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise ConfigError(f"config.json: classifier_pooling {pooling[:64]!r} is not supported; supported: cls, mean")
    return ClassHead(
        dense_bias=fields.flag("classifier_bias"),
        activation=decoders.activation(fields, "classifier_activation", "gelu"),
        norm=norm,
        is_of_mean=pooling == "mean",
    )


MODERN_BERT = encoder_family(
    ("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    parse,
    base="model.",
    heads=("head.", "decoder."),
)
