"""Families that differ from Llama in few things: EXAONE 4, SmolLM3, Nemotron, StarCoder 2 and others."""

from tests.gpu_worker.families.case import Case, rope

_GROWTH = {"original_max_position_embeddings": 16, "factor": 8.0, "llama_4_scaling_beta": 0.1}

CASES = {
    "exaone4": Case("exaone4"),
    "exaone4-all-see-all": Case(
        "exaone4",
        {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 4,
            "tie_word_embeddings": True,
            **rope(
                "llama3",
                1e6,
                factor=16.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        },
    ),
    "smollm3": Case("smollm3"),
    "smollm3-window": Case("smollm3", {"use_sliding_window": True, "sliding_window": 12, "attention_bias": True}),
    "smollm3-listed": Case("smollm3", {"no_rope_layers": [0, 1, 1, 0], "mlp_bias": True, "tie_word_embeddings": False}),
    "nemotron": Case("nemotron", {"num_key_value_heads": 2}, by_transformers=False),
    "nemotron-biases": Case(
        "nemotron",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "num_key_value_heads": 4},
        by_transformers=False,
    ),
    "starcoder2": Case("starcoder2", {"sliding_window": 12}),
    "starcoder2-no-biases": Case("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "ministral3": Case("ministral3", rope("yarn", 1e6, mscale=1.0, mscale_all_dim=1.0, **_GROWTH)),
    "ministral3-window": Case("ministral3", {"sliding_window": 12, **rope("yarn", **_GROWTH)}),
    "seed_oss": Case("seed_oss"),
    "seed_oss-biases": Case("seed_oss", {"attention_out_bias": True, "mlp_bias": True, "head_dim": 32}),
    "hunyuan_v1_dense": Case("hunyuan_v1_dense", {"head_dim": 32}),
    "hunyuan_v1_dense-alpha": Case(
        "hunyuan_v1_dense",
        {"tie_word_embeddings": True, "head_dim": 16, **rope("dynamic", alpha=1000.0, factor=1.0)},
    ),
}
