"""GLM-4 and GLM-4-MoE."""

from tests.gpu_worker.families.case import Case, rope

_LARGE_MIXTURE = {"use_qk_norm": True, "head_dim": 32, "routed_scaling_factor": 2.5, "first_k_dense_replace": 2}
_GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 2, "num_key_value_heads": 4}

CASES = {
    "glm": Case("glm", {"num_key_value_heads": 1}),
    "glm-whole-heads": Case("glm", {"attention_bias": False, **rope("default", 5e6, partial_rotary_factor=1.0)}),
    "glm4": Case("glm4"),
    "glm4-no-biases": Case("glm4", {"attention_bias": False, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "glm4-yarn": Case("glm4", rope("yarn", factor=4.0, original_max_position_embeddings=32, partial_rotary_factor=0.5)),
    "glm4_moe": Case("glm4_moe", {"attention_bias": True, **rope("default", 1e6, partial_rotary_factor=0.5)}),
    "glm4_moe-qk-norm": Case("glm4_moe", _LARGE_MIXTURE),
    "glm4_moe-groups": Case("glm4_moe", _GROUPS),
    "glm4_moe-plain-weights": Case("glm4_moe", {"norm_topk_prob": False, "first_k_dense_replace": 0}),
}
