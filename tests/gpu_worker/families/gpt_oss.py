"""gpt-oss."""

from tests.gpu_worker.families.case import Case, rope

_CLAMPED = {"experts.gate_up_proj": 3.0}

CASES = {
    "gpt_oss": Case(
        "gpt_oss",
        rope(
            "yarn",
            150000.0,
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=64,
        ),
        _CLAMPED,
    ),
    "gpt_oss-top-1": Case("gpt_oss", {"num_experts_per_tok": 1, **rope("default")}, _CLAMPED),
    "gpt_oss-no-biases": Case("gpt_oss", {"attention_bias": False, "num_experts_per_tok": 4}, _CLAMPED),
    "gpt_oss-all-see-all": Case("gpt_oss", {"layer_types": ["full_attention"] * 4}, _CLAMPED),
}
