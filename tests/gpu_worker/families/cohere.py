"""Cohere 1 and 2."""

from tests.gpu_worker.families.case import Case

CASES = {
    "cohere": Case("cohere", {"logit_scale": 0.5}),
    "cohere-qk-norm": Case("cohere", {"use_qk_norm": True, "num_key_value_heads": 2, "logit_scale": 0.8}),
    "cohere-biases": Case("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
    "cohere2": Case("cohere2", {"num_key_value_heads": 2, "logit_scale": 0.25}),
    "cohere2-every-second": Case("cohere2", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
}
