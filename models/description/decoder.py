"""The description of a decoder: a family makes it from config.json; executors know nothing else about a model.

    embedding → layers (a mixer and an MLP, with norms around them) → norm → head

`gpu_worker/models/` has the blocks that compute it; `models/weights/decoder.py` says where its weights are.
"""

from typing import Literal

import msgspec

from penstock.config.ranks import Place
from penstock.models.description.model_config import KVShape, ModelConfig, PromptClasses
from penstock.models.description.names import Names
from penstock.models.description.recurrent import Recurrent, StateShape
from penstock.models.parsing.rope import RopeConfig
from penstock.models.vision.kinds import Vision

Range = tuple[int, int]
"""The first number, and the one after the last."""

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
    """What q_norm and k_norm span: a head, with shared weights or weights of its own ("each head"), or all of q (k)."""
    norms_follow_rope: bool = False
    v_norm_eps: float | None = None  # values are scaled to unit root mean square by head; this is added to the square
    values_are_keys: bool = False  # values are the keys' projection, before its norm
    shares_kv_of: int | None = None  # the layer whose keys and values it reads instead of its own
    rope: RopeConfig | None = None  # None: no rotation by position
    window: int | None = None  # position p attends to (p - window, p]
    window_is_chunk: bool = False  # but only within its own chunk of `window` positions
    softcap: float = 0.0  # of the scores; 0: none
    has_sinks: bool = False  # the softmax includes a learned logit per head, without a value
    query_growth: "QueryGrowth | None" = None
    has_output_gate: bool = False  # its output is multiplied by a sigmoid; stored with each head's q

    @property
    def kv(self) -> KVShape:
        """What attention keeps of a position."""
        return KVShape(self.num_kv_heads, self.head_dim, self.head_dim, self.window)

    @property
    def width(self) -> int:
        """Weights that a token's step reads, per number of the hidden size."""
        num_projected = 0 if self.shares_kv_of is not None else 1 if self.values_are_keys else 2
        of_queries = 2 + self.has_output_gate
        return (of_queries * self.num_heads + num_projected * self.num_kv_heads) * self.head_dim


class QueryGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """Queries at position p are multiplied by 1 + beta * log(1 + (p + shift) // length): Llama 4, Ministral 3."""

    beta: float
    length: float
    shift: int = 0


class Indexer(msgspec.Struct, frozen=True, kw_only=True):
    """Chooses the positions that a token attends to (DeepSeek-V3.2, "DeepSeek Sparse Attention", 2025).

    A position keeps an index key beside its latent. A token's small index heads score it, and each token attends to the
    `top_k` positions with the highest sums of weighted scores that are not negative: all of them, if it sees no more.
    """

    num_heads: int
    head_dim: int  # of index queries, and of the one key for all heads; the first `rope_dim` numbers are rotated
    top_k: int  # positions
    norm: Norm  # of index keys
    is_interleaved: bool = False  # neighbours rotate together, as weights are stored; else halves
    is_shared: bool = False  # this layer attends to what the last layer before it that is not shared has chosen


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2, 2024): a position keeps a latent, and a rotated key for all heads."""

    num_heads: int
    q_rank: int | None  # None: q is projected directly
    kv_rank: int  # of the latent
    nope_dim: int  # per q and k head, not rotated
    rope_dim: int  # per q head, and of the common key; rotated, if anything is
    v_dim: int
    scale: float
    rope: RopeConfig | None
    norm: Norm  # of both latents
    has_bias: bool = False  # of the projections to the latents, and of o
    indexer: Indexer | None = None  # None: a token attends to all positions before it

    @property
    def key_dim(self) -> int:
        """Numbers of a position that are multiplied with queries."""
        return self.kv_rank + self.rope_dim

    @property
    def kv(self) -> KVShape:
        """What attention keeps of a position: the normed latent, the rotated key, and the index key, if there is one.

        A layer that shares a choice leaves its index keys empty, because all layers of a page keep the same shape.
        """
        return KVShape(1, self.key_dim + (0 if self.indexer is None else self.indexer.head_dim), 0, None)

    @property
    def own_indexer(self) -> Indexer | None:
        """The indexer, if this layer chooses itself."""
        return None if self.indexer is None or self.indexer.is_shared else self.indexer

    @property
    def width(self) -> int:
        """As `Attention.width`."""
        queries = self.q_rank or self.num_heads * (self.nope_dim + self.rope_dim)
        of_index = 0 if (its := self.own_indexer) is None else its.head_dim + its.num_heads
        return queries + self.key_dim + self.num_heads * self.v_dim + of_index

    @property
    def num_latent_weights(self) -> int:
        """Weights between latents and heads."""
        queries = (self.q_rank or 0) * (self.nope_dim + self.rope_dim)
        its = self.own_indexer
        of_index = 0 if its is None else (self.q_rank or 0) * its.num_heads * its.head_dim
        return self.num_heads * (queries + self.kv_rank * (self.nope_dim + self.v_dim)) + of_index


class SideBySide(msgspec.Struct, frozen=True, kw_only=True):
    """Attention and a mixer with a state, side by side: a * attention(x) + b * recurrent(x) (Falcon-H1, 2025)."""

    attention: Attention
    recurrent: Recurrent
    attention_scale: float = 1.0  # a
    recurrent_scale: float = 1.0  # b

    @property
    def width(self) -> int:
        """As `Attention.width`."""
        return self.attention.width + self.recurrent.width


Mixer = Attention | LatentAttention | Recurrent | SideBySide


class DenseMLP(msgspec.Struct, frozen=True, kw_only=True):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) if it is not gated."""

    size: int
    activation: Activation = "silu"
    is_gated: bool = True
    has_bias: bool = False
    gate_scale: float = 1.0  # of gate(x), before the activation
    out_scale: float = 1.0

    @property
    def width(self) -> int:
        """As `Attention.width`."""
        return (2 + self.is_gated) * self.size


class Router(msgspec.Struct, frozen=True, kw_only=True):
    """Chooses the experts of a token, and their weights. Logits are computed in fp32.

    1. The scores: softmax or sigmoid over all logits; "top_softmax" takes the logits themselves.
    2. With groups, only experts of the `top_groups` best groups remain. A group is judged by the sum of its two best
       scores (`group_judge` "top2", after the correction) or by its best score ("max").
    3. The `top_k` experts with the best score plus correction; their weights are the scores without correction.
    4. The weights: divided by their sum if `renormalize` (plus `renormalize_eps`); their softmax for "top_softmax";
       then multiplied by `scale`.
    """

    kind: Literal["softmax", "sigmoid", "top_softmax"] = "softmax"
    top_k: int
    renormalize: bool = False
    renormalize_eps: float = 0.0
    has_bias: bool = False  # added to the logits
    has_correction: bool = False  # fp32, added to the scores only for the choice
    num_groups: int = 1
    top_groups: int = 1
    group_judge: Literal["top2", "max"] = "top2"
    scale: float = 1.0
    has_expert_scales: bool = False  # a learned factor for each expert's weight
    multiplies_input: bool = False  # the weight multiplies an expert's input instead of its output (Llama 4)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Whole experts spread over tensor ranks (`models/shards/placement.py`)."""

    ranks_of: tuple[tuple[int, ...], ...]  # for each expert, the tensor ranks that hold a copy, ascending
    fewest_travelling: int | None = None  # tokens of a step from which on they travel between ranks; None: never
    rank: int | None = None  # the rank that this describes; None: the whole model

    def held_by(self, rank: int) -> tuple[Range, ...]:
        """Return the experts of a rank."""
        held = [expert for expert, ranks in enumerate(self.ranks_of) if rank in ranks]
        begins = [expert for i, expert in enumerate(held) if not i or held[i - 1] != expert - 1]
        ends = [expert + 1 for i, expert in enumerate(held) if i + 1 == len(held) or held[i + 1] != expert + 1]
        return tuple(zip(begins, ends, strict=True))


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts. Each is an MLP: down(act(gate(x)) * up(x)), or down(act(up(x))) if it is not gated."""

    count: int
    size: int  # of each
    router: Router
    activation: Activation = "silu"
    is_gated: bool = True
    has_bias: bool = False
    shared: DenseMLP | None = None  # for every token
    shared_is_gated: bool = False  # its output is multiplied by a sigmoid computed from the token
    spread: Spread | None = None  # None: every rank has all of them, or a part of each

    @property
    def width_of_each(self) -> int:
        """Weights of an expert per number of the hidden size."""
        return (2 + self.is_gated) * self.size

    @property
    def width(self) -> int:
        """As `Attention.width`."""
        used = self.router.top_k
        if self.spread is not None and self.spread.rank is not None:
            held = sum(end - begin for begin, end in self.spread.held_by(self.spread.rank))
            used = -(-used * held // self.count)
        return self.count + self.width_of_each * used + (self.shared.width if self.shared is not None else 0)


class BesideMLP(msgspec.Struct, frozen=True, kw_only=True):
    """Experts beside a dense MLP: mlp_post(mlp(mlp_norm(x))) + post(experts(norm(x))) replaces the MLP.

    The router gets x scaled to unit root mean square, times its own weights divided by the square root of the size.
    """

    experts: Experts
    norm: Norm
    post: Norm
    mlp_post: Norm


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A mixer and an MLP, each added to the residual stream x.

    In sequence: x += r * post_mixer_norm(mixer(mixer_norm(x))); x += r * post_mlp_norm(mlp(mlp_norm(x))).
    In parallel: x += r * (mixer(mixer_norm(x)) + mlp(mlp_norm(x))); without mlp_norm the MLP gets the mixer's input.
    Without a mixer, or without an MLP, that summand and its norms are absent.
    At last, if the decoder has layer inputs: x += norm(up(act(down(x)) * its input); then x *= a learned number.
    """

    mixer: Mixer | None
    mlp: DenseMLP | Experts | None
    mixer_norm: Norm | None = None
    post_mixer_norm: Norm | None = None
    mlp_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    beside_mlp: BesideMLP | None = None
    is_parallel: bool = False
    residual_scale: float = 1.0  # r
    has_output_scale: bool = False

    @property
    def attention(self) -> Attention | LatentAttention | None:
        """The mixer, or the part of it, that keeps something of each position; None if there is none."""
        mixer = self.mixer.attention if isinstance(self.mixer, SideBySide) else self.mixer
        return mixer if isinstance(mixer, Attention | LatentAttention) else None

    @property
    def recurrent(self) -> Recurrent | None:
        """The mixer, or the part of it, that keeps a state of a row; None if there is none."""
        mixer = self.mixer.recurrent if isinstance(self.mixer, SideBySide) else self.mixer
        return None if isinstance(mixer, Attention | LatentAttention) else mixer

    @property
    def width(self) -> int:
        """As `Attention.width`."""
        parts = (self.mixer, self.mlp, None if self.beside_mlp is None else self.beside_mlp.experts)
        return sum(part.width for part in parts if part is not None)


class LearnedPositions(msgspec.Struct, frozen=True, kw_only=True):
    """A vector for each position, added to the token's."""

    count: int
    offset: int = 0  # position p has vector p + offset


class LayerInputs(msgspec.Struct, frozen=True, kw_only=True):
    """A vector for each layer and token, from the token itself and its embedding e (Gemma 3n, 2025).

    (norm(project(e) / sqrt(hidden size)) + sqrt(size) * table[token]) / sqrt(2), the norm over each layer's part.
    """

    size: int  # of each
    vocab_size: int  # of the table
    activation: Activation
    norm: Norm  # of the projection, and of the result before it is added to the residual stream
    image_row: int = 0  # of the table, for the positions of images


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a head that guesses tokens: what it is given of a position, g, and the next token's embedding, e.

    EAGLE, and layers that predict several tokens: the residual stream is project([embedding_norm(e), given_norm(g)]).
    EAGLE-3: nothing is projected; the residual stream is g, or given_norm(g) if that `is_residual`, and the first mixer
    gets the pair.
    """

    embedding_norm: Norm | None = None
    given_norm: Norm | None = None
    projects: bool = True
    has_bias: bool = False  # of the projection
    given_is_first: bool = False  # of the pair
    is_residual: bool = False


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a decoder that a rank holds (`models/shards/`)."""

    whole: "Decoder"
    place: Place
    layers: Range  # numbered as in the checkpoint
    vocab: Range  # rows of the embedding, and outputs of the head
    layer_vocab: Range = (0, 0)  # rows of the table of layer inputs


class Decoder(ModelConfig, frozen=True, kw_only=True):
    """A decoder, or a rank's part of one; then heads, sizes and layers are the rank's own."""

    hidden_size: int
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    tied_embeddings: bool = False
    embedding_scale: float = 1.0
    embedding_scale_is_rounded: bool = False  # to the dtype of activations
    positions: LearnedPositions | None = None
    layer_inputs: LayerInputs | None = None
    entry: Entry | None = None  # None: the input is embeddings alone
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # logits become cap * tanh(logit / cap); 0: none
    names: Names = Names()  # of the weights in the checkpoint
    shard: Shard | None = None  # None: this is the whole model
    has_embedding: bool = True  # False for later stages of a pipeline
    has_head: bool = True  # and a final norm; False for earlier stages
    vision: Vision | None = None  # the vision tower; None: the model takes only text

    @property
    def kv(self) -> tuple[KVShape, ...]:
        """What each layer keeps of a position; without layers that read another's KV, or keep a state."""
        return tuple(its.kv for _, its in self.attentions if _shared(its) is None)

    @property
    def kv_index(self) -> dict[int, int]:
        """For each layer with attention, the index in `kv` of what it reads."""
        owners = [i for i, its in self.attentions if _shared(its) is None]
        of_owner = {layer: index for index, layer in enumerate(owners)}
        shared = ((i, _shared(its)) for i, its in self.attentions)
        return {i: of_owner[i if other is None else other] for i, other in shared}

    @property
    def attentions(self) -> tuple[tuple[int, Attention | LatentAttention], ...]:
        """(layer number, attention) of each layer that has attention."""
        return tuple((i, its) for i, layer in enumerate(self.layers) if (its := layer.attention) is not None)

    @property
    def state_layers(self) -> dict[int, StateShape]:
        """What each layer with a state keeps of a row, by layer number."""
        return {i: its.state for i, layer in enumerate(self.layers) if (its := layer.recurrent) is not None}

    @property
    def state_bytes(self) -> int:
        return sum(part.num_bytes for shape in self.state_layers.values() for part in shape)

    @property
    def prompt_classes(self) -> PromptClasses | None:
        ropes = {its.rope for _, its in self.attentions if its.rope is not None}
        found = [rope for rope in ropes if rope.depends_on_length]
        if not found:
            return None
        return PromptClasses(
            min(rope.original_max_len for rope in found), any(rope.kind == "dynamic" for rope in found)
        )

    @property
    def num_step_weights(self) -> int:
        """Weights of the matrices that a token's step reads, including only the experts that the token goes to."""
        inputs = 0 if self.layer_inputs is None else 3 * self.layer_inputs.size  # from and to each layer, and before
        each = (layer.width + inputs for layer in self.layers)
        latent = (its.num_latent_weights for _, its in self.attentions if isinstance(its, LatentAttention))
        return self.hidden_size * (sum(each) + self.vocab_size) + sum(latent)


def _shared(mixer: Attention | LatentAttention) -> int | None:
    return mixer.shares_kv_of if isinstance(mixer, Attention) else None


def positions_seen(first: int, count: int, window: int | None) -> float:
    """Sum of the positions that `count` positions see: each sees those up to its own, or the last `window` of them."""
    last = first + count
    if window is None or last <= window:
        return count * (first + 1 + last) / 2
    growing = max(0, window - first - 1)  # positions that see fewer than the window
    return growing * (first + 1 + window - 1) / 2 + (count - growing) * window
