"""Qwen2-MoE and Qwen3-MoE."""

from tests.gpu_worker.families.case import Case, rope

_WINDOW = {"use_sliding_window": True, "sliding_window": 12}

CASES = {
    "qwen3_moe": Case("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe-plain-weights": Case("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 4}),
    "qwen3_moe-some-dense": Case("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3_moe-every-second": Case("qwen3_moe", {"decoder_sparse_step": 2, "head_dim": 32}),
    "qwen3_moe-window": Case("qwen3_moe", {**_WINDOW, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_moe-yarn": Case("qwen3_moe", rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=128)),
    "qwen2_moe": Case("qwen2_moe"),
    "qwen2_moe-renormalized": Case("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False}),
    "qwen2_moe-some-dense": Case("qwen2_moe", {"mlp_only_layers": [0], "decoder_sparse_step": 2}),
    "qwen2_moe-window": Case("qwen2_moe", {**_WINDOW, "max_window_layers": 3}),
}
