"""Llama, Mistral, Qwen2, Qwen3 and Ernie 4.5."""

from tests.gpu_worker.families.case import Case, rope

CASES = {
    "llama": Case("llama"),
    "llama-biases": Case("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-llama3": Case(
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "mistral": Case("mistral"),
    "qwen2": Case("qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2}),
    "qwen3": Case("qwen3", {"head_dim": 32, **rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=128)}),
    "ernie4_5": Case("ernie4_5"),
    "ernie4_5-biases": Case("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
}
