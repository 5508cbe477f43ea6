"""OLMo 2 and 3."""

from tests.gpu_worker.families.case import Case

_FAR = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64}

CASES = {
    "olmo2": Case("olmo2", {"num_key_value_heads": 4}),
    "olmo2-grouped": Case("olmo2", {"attention_bias": True, "num_key_value_heads": 2}),
    "olmo3": Case("olmo3"),
    "olmo3-yarn": Case(
        "olmo3",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {**_FAR, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
}
