"""Models whose layers keep states: Mamba 2, gated delta rule, short convolutions, beside attention or alone."""

from typing import Any

from tests.gpu_worker.families.case import Case, rope
from tests.gpu_worker.families.granite import MULTIPLIERS

MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_HYBRID = {
    **MAMBA,
    **MULTIPLIERS,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "shared_intermediate_size": 40,
}
_GRANITE = {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}

_UNTIED = {"tie_word_embeddings": False}
_CONVS = {"layer_types": ["conv", "full_attention", "conv", "conv"]}
DELTA = {
    "layer_types": _GRANITE["layer_types"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "head_dim": 16,
}
OLMO = {
    **DELTA,
    # As large as each other: transformers saves three convolutions of equal sizes, whatever their sizes are.
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 12,
}
KIMI = {
    "layer_types": _GRANITE["layer_types"],
    "linear_num_heads": 4,
    "linear_head_dim": 12,
    "num_key_value_heads": 4,
}
_BIASED = {"attention_bias": True}
SECTIONS = rope("default", partial_rotary_factor=0.25, mrope_section=[1, 1, 0], mrope_interleaved=True)
_ALONE = {"num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2, "chunk_size": 16}
_FALCON = {
    **MAMBA,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.7,
    "embedding_multiplier": 3.0,
    "key_multiplier": 0.6,
    "lm_head_multiplier": 0.8,
    "mlp_multipliers": [0.9, 1.4],
    "ssm_in_multiplier": 1.3,
    "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7],
    "ssm_out_multiplier": 0.6,
}
_NEMOTRON_EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
    "ssm_state_size": 12,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "n_routed_experts": 8,
    "moe_shared_expert_intermediate_size": 56,
}

CASES = {
    "granitemoehybrid": Case("granitemoehybrid", {**_HYBRID, **_GRANITE}, by_transformers=False),
    "granitemoehybrid-dense-rope": Case(
        "granitemoehybrid",
        {
            **_HYBRID,
            **_GRANITE,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "time_step_limit": (0.4, 1.5),
            "tie_word_embeddings": True,
        },
        by_transformers=False,
    ),
    "bamba": Case("bamba", {**MAMBA, "attn_layer_indices": [1, 3]}, by_transformers=False),
    "bamba-biases": Case(
        "bamba",
        {**MAMBA, "attn_layer_indices": [2], "mamba_conv_bias": False, "attention_bias": True, "mlp_bias": True},
        by_transformers=False,
    ),
    "lfm2": Case("lfm2", {**_CONVS, "tie_word_embeddings": True}, by_transformers=False),
    "lfm2-biases": Case(
        "lfm2",
        {**_CONVS, **_UNTIED, "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
        by_transformers=False,
    ),
    "lfm2_moe": Case(
        "lfm2_moe", {**_CONVS, "num_dense_layers": 1, "routed_scaling_factor": 1.5}, by_transformers=False
    ),
    "qwen3_next": Case("qwen3_next", DELTA, by_transformers=False),
    "qwen3_next-dense": Case(
        "qwen3_next",
        {**DELTA, **_BIASED, "mlp_only_layers": [0], "linear_num_value_heads": 2, "norm_topk_prob": False},
        by_transformers=False,
    ),
    "qwen3_5_text": Case("qwen3_5_text", {**DELTA, **SECTIONS}, by_transformers=False),
    "qwen3_5_moe_text": Case("qwen3_5_moe_text", {**DELTA, **SECTIONS, "num_experts": 8}, by_transformers=False),
    "olmo_hybrid": Case("olmo_hybrid", {**OLMO, "rope_parameters": {"rope_theta": None}}, by_transformers=False),
    "olmo_hybrid-rotary": Case(
        "olmo_hybrid",
        {**OLMO, **_BIASED, "linear_allow_neg_eigval": False, "linear_num_key_heads": 4, "linear_key_head_dim": 12},
        by_transformers=False,
    ),
    "mamba2": Case("mamba2", _ALONE, by_transformers=False),
    "mamba2-bounded": Case(
        "mamba2",
        {**_ALONE, "use_bias": True, "use_conv_bias": False, "n_groups": 1, "time_step_limit": (0.4, 1.5)},
        by_transformers=False,
    ),
    "mamba": Case("mamba", by_transformers=False),
    "mamba-biases": Case(
        "mamba",
        {"state_size": 11, "time_step_rank": 7, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False},
        by_transformers=False,
    ),
    "falcon_mamba": Case("falcon_mamba", {"state_size": 12, "time_step_rank": 5}, by_transformers=False),
    "jamba": Case("jamba", {"attn_layer_period": 3, "attn_layer_offset": 1}, by_transformers=False),
    "jamba-dense": Case(
        "jamba",
        {
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_dt_rank": 9,
        },
        by_transformers=False,
    ),
    "kimi_linear": Case("kimi_linear", KIMI, by_transformers=False),
    "kimi_linear-groups": Case(
        "kimi_linear",
        {
            **KIMI,
            "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["sparse", "sparse", "dense", "sparse"],
            "attention_bias": True,
            "linear_conv_kernel_dim": 3,
            "n_group": 4,
            "norm_topk_prob": False,
            "q_lora_rank": 20,
            "topk_group": 2,
        },
        by_transformers=False,
    ),
    "falcon_h1": Case("falcon_h1", {**_FALCON, "mamba_rms_norm": True}, by_transformers=False),
    "falcon_h1-after-gate": Case(
        "falcon_h1", {**_FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False}, by_transformers=False
    ),
    "falcon_h1-without-norm": Case("falcon_h1", _FALCON, by_transformers=False),
    "nemotron_h": Case(
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
            "ssm_state_size": 12,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "time_step_min": 0.4,
        },
        by_transformers=False,
    ),
    "nemotron_h-experts": Case("nemotron_h", _NEMOTRON_EXPERTS, by_transformers=False),
    "nemotron_h-experts-in-groups": Case(
        "nemotron_h",
        {
            **_NEMOTRON_EXPERTS,
            "mlp_bias": True,
            "n_group": 4,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "topk_group": 2,
        },
        by_transformers=False,
    ),
}
