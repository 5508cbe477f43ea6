"""Gemma 1, 2 and 3."""

from tests.gpu_worker.families.case import Case

_CAPPED = {"q_proj": 3.0, "k_proj": 3.0}
"""Scores of a softcap's size."""
_TWO_ROPES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
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
}
