"""GPT-NeoX, StableLM, Phi 1 and 2: attention and MLP beside each other, part of each head rotated."""

from tests.gpu_worker.families.case import Case, rope

CASES = {
    "gpt_neox": Case("gpt_neox"),
    "gpt_neox-in-sequence": Case("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "gpt_neox-fast-gelu": Case("gpt_neox", {"hidden_act": "gelu_fast", "hidden_size": 96}),  # heads of 24
    "gpt_neox-whole-heads": Case("gpt_neox", rope("default", partial_rotary_factor=1.0)),
    "stablelm": Case("stablelm", {"num_key_value_heads": 4}, by_transformers=False),
    "stablelm-biases": Case("stablelm", {"use_qkv_bias": True, "tie_word_embeddings": True}, by_transformers=False),
    "stablelm-parallel": Case("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}, by_transformers=False),
    "phi": Case("phi"),
    "phi-qk-norm": Case("phi", {"qk_layernorm": True, "num_key_value_heads": 2}),
    "phi-quarter": Case("phi", rope("default", partial_rotary_factor=0.25)),
}
