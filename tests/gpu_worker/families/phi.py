"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini."""

from typing import Any

from tests.gpu_worker.families.case import Case, rope


def _longrope(rotary_dim: int, share: float, trained_len: int = 64) -> dict[str, Any]:
    pairs = range(rotary_dim // 2)
    factors: dict[str, Any] = {"short_factor": [1.0 + i / 8 for i in pairs], "long_factor": [2.0 + i for i in pairs]}
    return {
        "original_max_position_embeddings": trained_len,
        **rope("longrope", partial_rotary_factor=share, original_max_position_embeddings=trained_len, **factors),
    }


CASES = {
    "phi3": Case("phi3", {"num_key_value_heads": 4}),
    "phi3-window": Case("phi3", {"sliding_window": 12}),
    "phi3-longrope": Case("phi3", _longrope(16, 1.0)),
    "phi3-longrope-long": Case("phi3", _longrope(16, 1.0, 10), by_transformers=False, lens=(40, 33, 11, 17, 25)),
    "phi4-mini": Case("phi3", {"tie_word_embeddings": True, **_longrope(12, 0.75)}),
}
