"""The description of an encoder: a model whose positions all see each other, and whose rows keep nothing in pages.

    embedding (of tokens, positions, types) → norm → layers (attention and an MLP, with norms) → hidden states → head

`gpu_worker/models/encoder.py` computes it; `models/weights/encoder.py` says where its weights are.
"""

import msgspec

from penstock.models.description.decoder import Activation, DenseMLP, LearnedPositions, Norm
from penstock.models.description.model_config import KVShape, ModelConfig
from penstock.models.parsing.rope import RopeConfig


class EncoderAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Attention without a direction: each position sees those before it and those behind it."""

    num_heads: int
    head_dim: int
    scale: float  # of the scores
    has_bias: bool = True  # of all projections
    rope: RopeConfig | None = None  # None: no rotation by position
    reach: int | None = None  # a position sees so many on either side; None: all


class EncoderLayer(msgspec.Struct, frozen=True, kw_only=True):
    """Attention and an MLP, each added to the residual stream x.

    With norms behind (BERT): x = norm(x + attention(x)); x = norm(x + mlp(x)).
    With norms before (ModernBERT): x += attention(norm(x)); x += mlp(norm(x)).
    """

    attention: EncoderAttention
    mlp: DenseMLP
    has_first_norm: bool = True  # whether the attention has a norm


class ClassHead(msgspec.Struct, frozen=True, kw_only=True):
    """From a pooled hidden state to a number for each class: out(norm(act(dense(x)))).

    Each step but the last may be absent.
    """

    has_dense: bool = True
    dense_bias: bool = True
    activation: Activation | None = None  # None: tanh
    norm: Norm | None = None
    has_bias: bool = True  # of the last product
    is_of_mean: bool = False  # the mean over all positions is classified, not the first position


class EncoderNames(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's names of its weights, as in `Names`; the defaults are BERT's."""

    base: str  # the beginning of all names but the head's; checkpoints of the model without a head may lack it
    embedding: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    layer: str = "encoder.layer.{}."
    attention_norm: str = "attention.output.LayerNorm"
    mlp_norm: str = "output.LayerNorm"
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    o: str = "attention.output.dense"
    gate_up: tuple[str, ...] = ("intermediate.dense",)
    down: str = "output.dense"
    final_norm: str = ""
    head_dense: str = ""  # these and the next ones: with the beginning
    head_norm: str = ""
    head_out: str = "classifier"


class Encoder(ModelConfig, frozen=True, kw_only=True):
    """An encoder of texts, with or without a head that classifies."""

    draws_tokens: bool = False
    hidden_size: int
    layers: tuple[EncoderLayer, ...]
    norm: Norm  # all norms are alike
    norms_are_before: bool = False
    has_final_norm: bool = False
    positions: LearnedPositions | None = None
    num_types: int = 0  # of tokens: 1 in the second text of a pair, else 0; 0: there are no types
    head: ClassHead | None = None
    names: EncoderNames

    @property
    def kv(self) -> tuple[KVShape, ...]:
        """Nothing: all positions of a text are computed at once."""
        return ()

    @property
    def why_whole(self) -> str:
        return "is an encoder"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_step_weights(self) -> int:
        attention = sum(4 * layer.attention.num_heads * layer.attention.head_dim for layer in self.layers)
        return self.hidden_size * (attention + sum(layer.mlp.width for layer in self.layers))
