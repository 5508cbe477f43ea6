"""The description of a decoder: what a family makes of config.json, and all that the executors know of a model.

    embedding → layers (a mixer and an MLP, with norms around them) → norm → head

The blocks that compute it are in `gpu_worker/models/`; `core/checkpoint/weights.py` says where its weights are.
"""

from typing import Literal

import msgspec

from penstock.core.checkpoint.families.rope import RopeConfig
from penstock.core.checkpoint.model_config import KVShape, ModelConfig, PromptClasses
from penstock.core.checkpoint.names import Names

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"]
"""`clamped_swiglu` (gpt-oss): (min(up, 7) + 1) * g * sigmoid(1.702 g), g = min(gate, 7); up is at least -7."""


class Norm(msgspec.Struct, frozen=True, kw_only=True):
    """A norm over a vector, or over each head."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    offset: float = 0.0  # added to the stored weight
    has_weight: bool = True
    has_bias: bool = False


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Attention with keys and values for each position."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores
    qkv_bias: bool = False
    o_bias: bool = False
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    norms_span: Literal["head", "each head", "all"] = "head"
    """What q_norm and k_norm see: a head, with weights that all heads share or of its own; or q (k) as a whole."""
    norms_follow_rope: bool = False
    rope: RopeConfig | None = None  # None: positions do not rotate anything
    window: int | None = None  # position p sees (p - window, p]
    softcap: float = 0.0  # of the scores; 0: none
    has_sinks: bool = False  # a learned logit for each head in the softmax, without a value
    query_growth: "QueryGrowth | None" = None

    @property
    def kv(self) -> KVShape:
        """What it keeps of a position."""
        return KVShape(self.num_kv_heads, self.head_dim, self.head_dim, self.window)

    @property
    def width(self) -> int:
        """Weights that a token's step reads, for each number of the hidden size."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim


class QueryGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """Queries at position p are multiplied by 1 + beta * log(1 + (p + shift) // length): Llama 4, Ministral 3."""

    beta: float
    length: float
    shift: int = 0


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2, 2024): positions keep a latent and one rotated key for all heads."""

    num_heads: int
    q_rank: int | None  # None: q is projected directly
    kv_rank: int  # of the latent
    nope_dim: int  # of each q and k head, not rotated
    rope_dim: int  # of each q head, and of the common key, rotated
    v_dim: int
    scale: float
    rope: RopeConfig
    norm: Norm  # of both latents
    has_bias: bool = False  # of the projections to the latents, and of o

    @property
    def kv(self) -> KVShape:
        """What it keeps of a position: the latent, normed, then the rotated key."""
        return KVShape(1, self.kv_rank + self.rope_dim, 0, None)

    @property
    def width(self) -> int:
        """As `Attention.width`."""
        queries = self.q_rank or self.num_heads * (self.nope_dim + self.rope_dim)
        return queries + self.kv_rank + self.rope_dim + self.num_heads * self.v_dim

    @property
    def num_latent_weights(self) -> int:
        """Weights between latents and heads."""
        queries = (self.q_rank or 0) * (self.nope_dim + self.rope_dim)
        return self.num_heads * (queries + self.kv_rank * (self.nope_dim + self.v_dim))


class DenseMLP(msgspec.Struct, frozen=True, kw_only=True):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) if it is not gated."""

    size: int
    activation: Activation = "silu"
    is_gated: bool = True
    has_bias: bool = False

    @property
    def width(self) -> int:
        """As `Attention.width`."""
        return (2 + self.is_gated) * self.size


class Router(msgspec.Struct, frozen=True, kw_only=True):
    """Which experts a token goes to, and with which weights. Its logits are computed in fp32.

    1. The scores: softmax or sigmoid over all logits; "top_softmax" takes the logits themselves.
    2. With groups, only experts of the `top_groups` best groups remain. A group is judged by the sum of its two best
       (`group_judge` "top2", after the correction) or by its best ("max").
    3. The `top_k` best of scores plus correction; their weights are the scores without it.
    4. The weights: divided by their sum if `renormalize` (plus `renormalize_eps`); their softmax for "top_softmax";
       then multiplied by `scale`.
    """

    kind: Literal["softmax", "sigmoid", "top_softmax"] = "softmax"
    top_k: int
    renormalize: bool = False
    renormalize_eps: float = 0.0
    has_bias: bool = False  # added to the logits
    has_correction: bool = False  # fp32, added to the scores for the choice alone
    num_groups: int = 1
    top_groups: int = 1
    group_judge: Literal["top2", "max"] = "top2"
    scale: float = 1.0
    multiplies_input: bool = False  # an expert's input is multiplied by its weight, instead of its output (Llama 4)


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts, each of them a gated MLP."""

    count: int
    size: int  # of each
    router: Router
    activation: Activation = "silu"
    has_bias: bool = False
    shared: DenseMLP | None = None  # every token goes through it
    shared_is_gated: bool = False  # its output is multiplied by a sigmoid that the token decides

    @property
    def width(self) -> int:
        """As `Attention.width`."""
        return self.count + 3 * self.size * self.router.top_k + (self.shared.width if self.shared is not None else 0)


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A mixer and an MLP, each added to the residual stream x.

    In sequence: x += r * post_mixer_norm(mixer(mixer_norm(x))); x += r * post_mlp_norm(mlp(mlp_norm(x))).
    In parallel: x += r * (mixer(mixer_norm(x)) + mlp(mlp_norm(x))); without mlp_norm the MLP gets what the mixer gets.
    """

    mixer: Attention | LatentAttention
    mlp: DenseMLP | Experts
    mixer_norm: Norm | None = None
    post_mixer_norm: Norm | None = None
    mlp_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    is_parallel: bool = False
    residual_scale: float = 1.0  # r


class LearnedPositions(msgspec.Struct, frozen=True, kw_only=True):
    """A vector for each position, added to the token's."""

    count: int
    offset: int = 0  # position p has vector p + offset


class Decoder(ModelConfig, frozen=True, kw_only=True):
    """A decoder."""

    hidden_size: int
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    tied_embeddings: bool = False
    embedding_scale: float = 1.0
    embedding_scale_is_rounded: bool = False  # to the dtype of activations
    positions: LearnedPositions | None = None
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # logits become cap * tanh(logit / cap); 0: none
    names: Names = Names()  # of the weights in the checkpoint

    @property
    def kv(self) -> tuple[KVShape, ...]:
        return tuple(layer.mixer.kv for layer in self.layers)

    @property
    def prompt_classes(self) -> PromptClasses | None:
        ropes = {layer.mixer.rope for layer in self.layers if layer.mixer.rope is not None}
        found = [rope for rope in ropes if rope.depends_on_length]
        if not found:
            return None
        return PromptClasses(
            min(rope.original_max_len for rope in found), any(rope.kind == "dynamic" for rope in found)
        )

    @property
    def num_step_weights(self) -> int:
        """Weights of the matrices that a token's step reads: of all experts only those that it goes to."""
        each = (layer.mixer.width + layer.mlp.width for layer in self.layers)
        latent = (layer.mixer.num_latent_weights for layer in self.layers if isinstance(layer.mixer, LatentAttention))
        return self.hidden_size * (sum(each) + self.vocab_size) + sum(latent)
