"""Rotary settings of GGUF files, in config.json's form.

Llama 3's scaling and LongRoPE are stored as tensors of factors for each pair's wavelength.
"""

from typing import Any

from penstock.config.options import ConfigError
from penstock.models.gguf.keys import Keys

_OF_ALL, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"


def rope_fields(keys: Keys, head_dim: int) -> dict[str, Any]:
    """Return `rope_theta`, `rope_scaling`, and the rotated share of a head if it is not the whole."""
    fields: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 1e4), "rope_scaling": _scaling(keys)}
    rotated = keys.whole("rope.dimension_count", head_dim)
    return fields if rotated == head_dim else fields | {"partial_rotary_factor": rotated / head_dim}


def _scaling(keys: Keys) -> dict[str, Any] | None:
    trained_len = keys.whole("context_length")
    original_len = keys.whole("rope.scaling.original_context_length", trained_len)
    if keys.has_tensor(_OF_ALL):
        factors = keys.floats(_OF_ALL)
        if all(factor == 1.0 for factor in factors):
            return None
        # The factors are the same for all lengths, so only the trained length is needed.
        same = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return {"rope_type": "longrope", "original_max_position_embeddings": trained_len} | same
    if keys.has_tensor(_SHORT):
        scaling = {
            "rope_type": "longrope",
            "short_factor": keys.floats(_SHORT),
            "long_factor": keys.floats(_LONG),
            "original_max_position_embeddings": original_len,
        }
        if keys.has("rope.scaling.attn_factor"):
            scaling["attention_factor"] = keys.number("rope.scaling.attn_factor")
        return scaling
    kind, factor = keys.text("rope.scaling.type", "none"), keys.number("rope.scaling.factor", 0.0)
    match kind:
        case "none" | "longrope":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": factor} if factor not in (0.0, 1.0) else None
        case "yarn":
            scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original_len}
            for field in ("beta_fast", "beta_slow"):
                if keys.has(f"rope.scaling.yarn_{field}"):
                    scaling[field] = keys.number(f"rope.scaling.yarn_{field}")
            return scaling
        case _:
            raise ConfigError(f"GGUF files with rope.scaling.type {kind[:64]!r} are not supported")
