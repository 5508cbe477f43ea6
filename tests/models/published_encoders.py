"""Published encoders: what their config.json says that matters, and how many parameters their makers count.

Makers count poolers and heads for masked words, too, which are a small part.
"""

from typing import Any, NamedTuple


class PublishedEncoder(NamedTuple):
    """A model by its name on the Hugging Face hub."""

    name: str
    architecture: str
    parameters: float  # in millions, to 2 %
    fields: dict[str, Any]


def _bert(hidden: int, layers: int, heads: int, vocabulary: int = 30522, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": vocabulary,
        **more,
    }


_XLM_R = {"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
_M3 = _bert(1024, 24, 16, 250002, max_position_embeddings=8194, **_XLM_R)
_MODERN = {"vocab_size": 50368, "max_position_embeddings": 8192, "local_attention": 128, "norm_eps": 1e-5}

ENCODERS = (
    PublishedEncoder("sentence-transformers/all-MiniLM-L6-v2", "BertModel", 22.7, _bert(384, 6, 12)),
    PublishedEncoder("BAAI/bge-small-en-v1.5", "BertModel", 33.4, _bert(384, 12, 12)),
    PublishedEncoder("BAAI/bge-base-en-v1.5", "BertModel", 109, _bert(768, 12, 12)),
    PublishedEncoder("BAAI/bge-large-en-v1.5", "BertModel", 335, _bert(1024, 24, 16)),
    PublishedEncoder("intfloat/e5-base-v2", "BertModel", 109, _bert(768, 12, 12)),
    PublishedEncoder(
        "intfloat/multilingual-e5-small", "BertModel", 118, _bert(384, 12, 12, 250037)
    ),
    PublishedEncoder(
        "cross-encoder/ms-marco-MiniLM-L6-v2", "BertForSequenceClassification", 22.7,
        _bert(384, 6, 12, id2label={"0": "LABEL_0"}),
    ),
    PublishedEncoder(
        "intfloat/multilingual-e5-large", "XLMRobertaModel", 560,
        _bert(1024, 24, 16, 250002, max_position_embeddings=514, **_XLM_R),
    ),
    PublishedEncoder("BAAI/bge-m3", "XLMRobertaModel", 568, _M3),
    PublishedEncoder(
        "BAAI/bge-reranker-v2-m3", "XLMRobertaForSequenceClassification", 568, _M3 | {"id2label": {"0": "LABEL_0"}}
    ),
    PublishedEncoder(
        "answerdotai/ModernBERT-base", "ModernBertForMaskedLM", 149,
        _MODERN | {"hidden_size": 768, "num_hidden_layers": 22, "num_attention_heads": 12, "intermediate_size": 1152},
    ),
    PublishedEncoder(
        "answerdotai/ModernBERT-large", "ModernBertForMaskedLM", 395,
        _MODERN | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 2624},
    ),
    PublishedEncoder(
        "nomic-ai/nomic-embed-text-v1.5", "NomicBertModel", 137,
        {
            "n_embd": 768, "n_head": 12, "n_layer": 12, "n_inner": 3072, "n_positions": 8192,
            "max_trained_positions": 2048, "vocab_size": 30528, "activation_function": "swiglu",
            "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "type_vocab_size": 2,
            "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "prenorm": False,
        },
    ),
    PublishedEncoder(
        "jinaai/jina-embeddings-v3-hf", "JinaEmbeddingsV3Model", 559,
        _bert(1024, 24, 16, 250002, max_position_embeddings=8194, rope_theta=20000.0, **_XLM_R),
    ),
)  # fmt: skip
