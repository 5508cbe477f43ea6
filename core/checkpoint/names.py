"""What checkpoints call the weights of a decoder."""

import msgspec


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint calls its weights; the defaults are Llama's names, which most others adopted.

    `layer` has a place for the layer's number; names of a layer's parts follow it, those of experts with a place for
    the expert's number, or without one if a tensor holds all of them (likewise `q_norm` and `k_norm`, if each head has
    a norm of its own). ".weight" and ".bias" are appended, but not to
    `sinks`, `correction` and tensors of all experts.
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
    qkv_by_head: bool = False  # the fused one has each head's q, k and v next to each other
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    q: str = "self_attn.q_proj"  # of latent attention; so are the next ones
    q_a: str = "self_attn.q_a_proj"
    q_a_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # one: a fused projection, or an MLP without gates
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    correction_is_row: bool = False  # it is stored as [1, experts]
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    shared_gate_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    is_transposed: bool = False  # matrices of layers are stored as [in, out]
    experts_are_transposed: bool = False  # the same for tensors of all experts
    experts_alternate: bool = False  # in those, gates and ups alternate
    unused_layers: int = 0  # stored after the last one: they predict more tokens at once, and are not computed
