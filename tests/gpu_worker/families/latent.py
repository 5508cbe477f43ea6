"""Latent attention: DeepSeek V2 and V3 (with Kimi-K2 and Moonlight), GLM-4.7-Flash, Youtu."""

from tests.gpu_worker.families.case import Case, rope

_YARN = {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 1.0, "beta_slow": 0.1}
_OF_V3 = {"head_dim": 8, "num_key_value_heads": 4, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
_ONE_GROUP = {**_OF_V3, "n_group": 1, "topk_group": 1}
_LITE = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 48,
}
_INDEX = {"index_n_heads": 12, "index_head_dim": 24, "index_topk": 7}

CASES = {
    "deepseek_v3": Case("deepseek_v3", {**_OF_V3, **rope("yarn", mscale=1.0, mscale_all_dim=1.0, **_YARN)}),
    "deepseek_v3-plain": Case("deepseek_v3", {**_OF_V3, "rope_interleave": False, "norm_topk_prob": False}),
    "deepseek_v3-kimi": Case(
        "deepseek_v3", {**_ONE_GROUP, "num_attention_heads": 5, "num_key_value_heads": 5, "n_shared_experts": 2}
    ),
    "deepseek_v3-moonlight": Case("deepseek_v3", {**_ONE_GROUP, "q_lora_rank": None, "attention_bias": True}),
    "deepseek_v2-lite": Case("deepseek_v2", {**_LITE, **rope("yarn", mscale=0.707, mscale_all_dim=0.707, **_YARN)}),
    "deepseek_v2": Case(
        "deepseek_v2",
        {
            "head_dim": 8,
            "num_key_value_heads": 4,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "num_experts_per_tok": 3,
            "mlp_bias": True,
            "attention_bias": True,
            **rope("yarn", mscale=1.0, mscale_all_dim=0.5, **_YARN),
        },
    ),
    "glm4_moe_lite": Case(
        "glm4_moe_lite", {"head_dim": 8, "num_key_value_heads": 4, "v_head_dim": 40, "rms_norm_eps": 1e-4}
    ),
    "glm4_moe_lite-some-dense": Case(
        "glm4_moe_lite",
        {
            "head_dim": 8,
            "num_key_value_heads": 4,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "n_group": 2,
        },
        seed=1,
    ),
    # Each token chooses 7 of up to 60 positions. With few index heads many scores would be exactly 0, and choices vary.
    "deepseek_v32": Case("deepseek_v32", {**_OF_V3, **_INDEX, **rope("yarn", mscale_all_dim=1.0, **_YARN)}),
    "glm_moe_dsa": Case("glm_moe_dsa", {**_ONE_GROUP, **_INDEX}),
    "glm_moe_dsa-shared": Case(
        "glm_moe_dsa", {**_ONE_GROUP, **_INDEX, "indexer_types": ["full", "shared", "shared", "full"]}
    ),
    "youtu": Case("youtu", {"head_dim": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}),
}
