"""BERT, and RoBERTa with its descendants (XLM-R, CamemBERT): learned positions, a norm behind each sum, biases."""

from functools import partial

from penstock.config.options import ConfigError
from penstock.models.description.decoder import DenseMLP, LearnedPositions, Norm
from penstock.models.description.encoder import ClassHead, Encoder, EncoderAttention, EncoderLayer, EncoderNames
from penstock.models.parsing import decoders
from penstock.models.parsing.encoders import CLASSIFIES, encoder_family, num_classes, refuse
from penstock.models.parsing.json_fields import JsonFields

_BERT = EncoderNames(base="bert.", head_dense="bert.pooler.dense")
_ROBERTA = EncoderNames(base="roberta.", head_dense="classifier.dense", head_out="classifier.out_proj")
_OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def parse(architecture: str, fields: JsonFields, *, names: EncoderNames, skips_padding: bool) -> Encoder:
    """Like `Family.parse`. `skips_padding`: positions count from behind the padding token's id, as in fairseq."""
    refuse(fields, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    hidden_size, num_heads = fields.whole("hidden_size", 768), fields.whole("num_attention_heads", 12)
    if hidden_size % num_heads:
        raise ConfigError(f"config.json: a hidden size of {hidden_size} is no multiple of {num_heads} heads")
    head_dim = hidden_size // num_heads
    attention = EncoderAttention(num_heads=num_heads, head_dim=head_dim, scale=head_dim**-0.5)
    mlp = DenseMLP(
        size=fields.whole("intermediate_size", 4 * hidden_size),
        activation=decoders.activation(fields, default="gelu"),
        is_gated=False,
        has_bias=True,
    )
    offset = fields.whole("pad_token_id", 1, least=0) + 1 if skips_padding else 0
    num_positions = fields.whole("max_position_embeddings", 512) - offset
    if num_positions < 1:
        raise ConfigError(f"config.json: max_position_embeddings leaves no position behind the {offset} of padding")
    layers = [EncoderLayer(attention=attention, mlp=mlp)] * decoders.num_layers(fields)
    classifies = architecture.endswith(CLASSIFIES)
    return Encoder(
        architecture=architecture,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(layers),
        norm=Norm(kind="layer", eps=fields.number("layer_norm_eps", 1e-12), has_bias=True),
        positions=LearnedPositions(count=num_positions, offset=offset),
        num_types=fields.whole("type_vocab_size", 2),
        num_classes=num_classes(fields) if classifies else 0,
        head=ClassHead() if classifies else None,
        max_model_len=num_positions,
        checkpoint_dtype=decoders.dtype(fields),
        names=names,
    )


BERT = encoder_family(
    ("BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"),
    partial(parse, names=_BERT, skips_padding=False),
    base="bert.",
    renamed=_OLD_NORMS,
)
ROBERTA = encoder_family(
    tuple(
        start + end
        for start in ("Roberta", "XLMRoberta", "Camembert")
        for end in ("Model", "ForMaskedLM", "ForSequenceClassification")
    ),
    partial(parse, names=_ROBERTA, skips_padding=True),
    base="roberta.",
    renamed=_OLD_NORMS,
)
