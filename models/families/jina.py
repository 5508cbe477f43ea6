"""jina-embeddings-v3 (Sturua et al., 2024), as transformers has it: XLM-R with rotated positions.

The adapters of its tasks are not applied: a vector is that of the model without any.
"""

from penstock.config.options import ConfigError
from penstock.models.description.decoder import DenseMLP, Norm
from penstock.models.description.encoder import ClassHead, Encoder, EncoderAttention, EncoderLayer, EncoderNames
from penstock.models.parsing import decoders
from penstock.models.parsing.encoders import CLASSIFIES, encoder_family, num_classes
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.parsing.rope import parse_rope

_NAMES = EncoderNames(
    base="roberta.",
    embedding_norm="emb_ln",
    layer="encoder.layers.{}.",
    attention_norm="norm1",
    mlp_norm="norm2",
    qkv=("mixer.Wqkv",),
    o="mixer.out_proj",
    gate_up=("mlp.fc1",),
    down="mlp.fc2",
    head_dense="classifier.dense",
    head_out="classifier.out_proj",
)


def parse(architecture: str, fields: JsonFields) -> Encoder:
    """Like `Family.parse`."""
    hidden_size, num_heads = fields.whole("hidden_size", 1024), fields.whole("num_attention_heads", 16)
    head_dim = fields.whole("head_dim", decoders.usual_head_dim(hidden_size, num_heads))
    rope, max_len = parse_rope(fields, fields.whole("max_position_embeddings", 8194), head_dim, theta=20_000.0)
    if rope.kind != "default":
        raise ConfigError(f"config.json: rope type {rope.kind!r} is not supported in encoders; supported: default")
    mlp = DenseMLP(
        size=fields.whole("intermediate_size", 4096),
        activation=decoders.activation(fields, default="gelu"),
        is_gated=False,
        has_bias=True,
    )
    attention = EncoderAttention(num_heads=num_heads, head_dim=head_dim, scale=head_dim**-0.5, rope=rope)
    classifies = architecture.endswith(CLASSIFIES)
    return Encoder(
        architecture=architecture,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden_size,
        layers=(EncoderLayer(attention=attention, mlp=mlp),) * decoders.num_layers(fields),
        norm=Norm(kind="layer", eps=fields.number("layer_norm_eps", 1e-5), has_bias=True),
        num_types=fields.whole("type_vocab_size", 1),
        num_classes=num_classes(fields) if classifies else 0,
        head=ClassHead() if classifies else None,
        max_model_len=max_len,
        checkpoint_dtype=decoders.dtype(fields),
        names=_NAMES,
    )


JINA_V3 = encoder_family(
    tuple(f"JinaEmbeddingsV3{end}" for end in ("Model", "ForMaskedLM", "ForSequenceClassification")),
    parse,
    base="roberta.",
)
