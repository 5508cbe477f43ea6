"""GPT-2, GPT-Neo and OPT, whose positions are learned."""

from tests.gpu_worker.families.case import Case

CASES = {
    "gpt2": Case("gpt2"),
    "gpt2-scales-by-layer": Case("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 96}),
    "gpt2-untied": Case("gpt2", {"tie_word_embeddings": False, "activation_function": "relu"}),
    "gpt_neo": Case(
        "gpt_neo",
        {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 9},
        by_transformers=False,
    ),
    "opt": Case("opt", {"ffn_dim": 96}),
    "opt-no-biases": Case("opt", {"ffn_dim": 96, "enable_bias": False, "activation_function": "gelu"}),
    "opt-weightless-norms": Case("opt", {"ffn_dim": 96, "layer_norm_elementwise_affine": False}),
    "opt-no-final-norm": Case("opt", {"ffn_dim": 96, "_remove_final_layer_norm": True}),
}
