"""Models whose layers keep states: Mamba 2, gated delta rule, short convolutions, beside attention or alone."""

from typing import Any

from tests.gpu_worker.families.case import Case
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
}
