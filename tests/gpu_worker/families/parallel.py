"""GPT-NeoX, GPT-J, Falcon, StableLM, Phi 1 and 2: attention and MLP beside each other, part of each head rotated."""

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
    "falcon": Case("falcon", by_transformers=False),
    "falcon-groups": Case(
        "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}, by_transformers=False
    ),
    "falcon-one-norm": Case(
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 80},
        by_transformers=False,
    ),
    "falcon-in-sequence": Case(
        "falcon",
        {"multi_query": False, "parallel_attn": False, "tie_word_embeddings": False, "bias": True},
        by_transformers=False,
    ),
    "gptj": Case("gptj", {"rotary_dim": 8}, by_transformers=False),
    "gptj-whole-heads": Case("gptj", {"rotary_dim": 16, "n_inner": 80}, by_transformers=False),
}
