"""Llama 4's text model."""

from tests.gpu_worker.families.case import Case

_DENSE_SIZE = {"intermediate_size_mlp": 112, "num_experts_per_tok": 1}
# Its place in a step is what transformers' code takes for a token's position there.
_WARM = {"floor_scale": 16, "attn_scale": 0.5}

CASES = {
    "llama4": Case("llama4_text", _DENSE_SIZE),
    "llama4-chunks": Case("llama4_text", {**_DENSE_SIZE, "attention_chunk_size": 20}, by_transformers=False),
    "llama4-warm": Case("llama4_text", {**_DENSE_SIZE, **_WARM}, by_transformers=False),
    "llama4-every-second": Case(
        "llama4_text", {**_DENSE_SIZE, "interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_bias": True}
    ),
    "llama4-top-2": Case("llama4_text", {**_DENSE_SIZE, "num_experts_per_tok": 2, "attn_temperature_tuning": False}),
}
