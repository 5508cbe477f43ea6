"""MiniMax-M2 and Ernie 4.5's mixture."""

from tests.gpu_worker.families.case import Case, rope

_ERNIE = {"moe_k": 2, "moe_intermediate_size": 48}

CASES = {
    "minimax_m2": Case("minimax_m2", rope("default", 5e6, partial_rotary_factor=0.5)),
    "minimax_m2-whole-heads": Case("minimax_m2", {"num_experts_per_tok": 4, "head_dim": 32}),
    "ernie4_5_moe": Case("ernie4_5_moe", _ERNIE),
    "ernie4_5_moe-biases": Case(
        "ernie4_5_moe",
        {**_ERNIE, "use_bias": True, "moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_layer_interval": 2},
    ),
    "ernie4_5_moe-no-shared": Case(
        "ernie4_5_moe", {**_ERNIE, "moe_num_shared_experts": 0, "tie_word_embeddings": False}
    ),
}
