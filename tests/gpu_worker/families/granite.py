"""Granite 3, dense and mixtures, and Granite 4 without Mamba."""

from tests.gpu_worker.families.case import Case

MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.5,
    "num_key_value_heads": 2,
}
_ROPE = {"position_embedding_type": "rope", "tie_word_embeddings": True}
_ALL_ATTENTION = {**MULTIPLIERS, "layer_types": ["full_attention"] * 4, "shared_intermediate_size": 40}

CASES = {
    "granite": Case("granite", {**MULTIPLIERS, "tie_word_embeddings": True}),
    "granite-biases": Case("granite", {**MULTIPLIERS, "attention_bias": True, "mlp_bias": True}),
    "hyperclovax": Case("hyperclovax", {**MULTIPLIERS, "num_key_value_heads": 2}),
    "hyperclovax-plain": Case("hyperclovax", {"use_post_norm": False, "tie_word_embeddings": True}),
    "granitemoe": Case("granitemoe", {**MULTIPLIERS, "tie_word_embeddings": True}),
    "granitemoe-top-4": Case("granitemoe", {**MULTIPLIERS, "num_experts_per_tok": 4, "attention_bias": True}),
    "granitemoehybrid-dense": Case(
        "granitemoehybrid",
        {**_ALL_ATTENTION, "num_local_experts": 0, **_ROPE},
        {"q_proj": 3.0, "k_proj": 3.0},
        by_transformers=False,
    ),
    "granitemoehybrid-experts": Case("granitemoehybrid", _ALL_ATTENTION, by_transformers=False),
    "granitemoeshared": Case("granitemoeshared", {**MULTIPLIERS, "shared_intermediate_size": 40}),
}
