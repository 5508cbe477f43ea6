"""The names of a decoder's weights in checkpoints."""

from typing import Literal, Self

import msgspec
from msgspec.structs import replace

ExpertLayout = Literal["apart", "joined", "turned"]
"""A tensor per expert; a tensor of all experts, [experts, outputs, inputs]; or the same with inputs first."""


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's names of its weights; the defaults are Llama's names, which most others adopted.

    `layer` has a place for the layer's number, and is followed by the names of the layer's parts. Names of experts have
    a place for the expert's number, unless one tensor always holds all experts (likewise `q_norm` and `k_norm`, if each
    head has its own norm). ".weight" and ".bias" are appended, except to `sinks`, `correction`, `a_log`, `dt_bias`,
    `skip`, scales and tensors of all experts.
    """

    embedding: str = "model.embed_tokens"
    positions: str = ""
    layer: str = "model.layers.{}."
    final_norm: str = "model.norm"
    head: str = "lm_head"
    mixer_norm: str = "input_layernorm"
    post_mixer_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    post_mlp_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # one: a fused projection
    qkv_by_head: bool = (
        False  # the fused projection has each key, its value behind it and the q heads of both before it
    )
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    q: str = "self_attn.q_proj"  # this and the next ones: of latent attention
    q_a: str = "self_attn.q_a_proj"
    q_a_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"
    k_b: str = ""  # kv_b's parts, if stored apart: for each head to the key, transposed, and to the value
    v_b: str = ""
    index_q: str = "self_attn.indexer.wq_b"  # this and the next ones: of an indexer
    index_k: str = "self_attn.indexer.wk"
    index_k_norm: str = "self_attn.indexer.k_norm"
    index_weights: str = "self_attn.indexer.weights_proj"
    recurrent_in: tuple[str, ...] = ("mamba.in_proj",)  # this and the next ones: of mixers with a state
    recurrent_gates: tuple[str, ...] = ()  # of the delta rule: to b and a, or f, z and b; of Mamba 1: to r, B and C
    recurrent_gate_norms: tuple[str, ...] = ()  # of r, B and C
    recurrent_steps: str = ""  # from r, or f, to the time steps
    recurrent_opening: str = ""  # from z to the gates of what was read
    recurrent_conv: tuple[str, ...] = ("mamba.conv1d",)  # several: of q, k and v, unless they are stored as one
    recurrent_norm: str = "mamba.norm"
    recurrent_out: str = "mamba.out_proj"
    a_log: str = "mamba.A_log"
    dt_bias: str = "mamba.dt_bias"
    skip: str = "mamba.D"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # one: a fused projection, or an MLP without gates
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    correction_is_row: bool = False  # it is stored as [1, experts]
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    experts: ExpertLayout = "apart"  # as published; a checkpoint's own layout takes precedence
    experts_alternate: bool = False  # in tensors of all experts, gates and ups alternate
    shared_gate_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    is_transposed: bool = False  # matrices of layers are stored as [in, out]
    beside_norm: str = ""  # this and the next ones: of experts beside an MLP
    beside_post: str = ""
    beside_mlp_post: str = ""
    router_scale: str = "router.scale"
    expert_scales: str = "router.per_expert_scale"
    layer_table: str = "model.embed_tokens_per_layer"
    layer_projection: str = "model.per_layer_model_projection"
    layer_projection_norm: str = "model.per_layer_projection_norm"
    layer_input_down: str = "per_layer_input_gate"
    layer_input_up: str = "per_layer_projection"
    layer_input_norm: str = "post_per_layer_input_norm"
    output_scale: str = "layer_scalar"
    entry_projection: str = "fc"  # of heads that guess tokens
    entry_embedding_norm: str = ""
    entry_given_norm: str = ""
    unused: tuple[str, ...] = ()  # beginnings of the names of unused tensors
    unused_layers: int = 0  # stored after the last layer: they predict several tokens, and are not computed

    @property
    def of_experts(self) -> tuple[tuple[str, ...], str]:
        """The names of gates and ups, and of downs, in the experts' layout."""
        if self.experts == "apart" or "{}" not in self.expert_down:
            return self.expert_gate_up, self.expert_down
        gate_up = "gate_up_proj" if len(self.expert_gate_up) > 1 else "up_proj"
        return (self.start_of_experts + gate_up,), self.start_of_experts + "down_proj"

    @property
    def start_of_experts(self) -> str:
        """The common beginning of all experts' names in every layout; the number or the part follows."""
        return self.expert_down.partition("{}")[0]

    @property
    def first_down(self) -> str:
        """The full name of the down matrix of the first expert, or of all experts."""
        down = self.of_experts[1]
        return f"{down.format(0)}.weight" if "{}" in down else down

    def plain(self, *, splits_kv_b: bool = False) -> Self:
        """Return the names for untransposed matrices, with each expert, gate and up stored by itself."""
        usual = Names()
        are_apart = "{}" in self.expert_down
        return replace(
            self,
            k_b="self_attn.k_b_proj" if splits_kv_b else "",
            v_b="self_attn.v_b_proj" if splits_kv_b else "",
            is_transposed=False,
            experts="apart",
            expert_gate_up=self.expert_gate_up if are_apart else usual.expert_gate_up,
            expert_down=self.expert_down if are_apart else usual.expert_down,
            shared_gate_up=self.shared_gate_up if len(self.shared_gate_up) > 1 else usual.shared_gate_up,
        )
