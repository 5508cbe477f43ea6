"""Gemma 1 to 4."""

from tests.gpu_worker.families.case import Case

_CAPPED = {"q_proj": 3.0, "k_proj": 3.0}
"""Scores of a softcap's size."""
_TWO_ROPES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
_FOUR = {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_hidden_layers": 6}
_SMALL_TABLE = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 199}
_IN_TURNS = {"layer_types": ["sliding_attention", "full_attention"] * 3}
_SIX = {"num_hidden_layers": 6, "query_pre_attn_scalar": 24}

CASES = {
    "gemma": Case("gemma"),
    "gemma-legacy-act": Case("gemma", {"hidden_act": "gelu", "num_key_value_heads": 1}),
    "gemma2": Case("gemma2", {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0}, _CAPPED),
    "gemma2-no-caps": Case(
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True, "head_dim": 32},
    ),
    "gemma3": Case("gemma3_text", {**_SIX, **_TWO_ROPES}),
    "gemma3-same-ropes": Case("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gemma3-caps": Case(
        "gemma3_text", {**_SIX, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "attention_bias": True}
    ),
    "gemma4": Case("gemma4_text", {**_FOUR, "final_logit_softcapping": 5.0}),
    "gemma4-e2b": Case(
        "gemma4_text",
        {**_FOUR, **_SMALL_TABLE, **_IN_TURNS, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    ),
    "gemma4-26b": Case(
        "gemma4_text",
        {
            **_FOUR,
            **_IN_TURNS,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma4-biases": Case("gemma4_text", {**_FOUR, **_IN_TURNS, "attention_bias": True}),
}
