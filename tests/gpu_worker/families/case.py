"""One case: an architecture with options that a published configuration uses, in a few ten thousand weights."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

SIZES: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 48,
    "moe_num_experts": 8,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 4,
    "n_positions": 512,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "pad_token_id": 0,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "shared_expert_intermediate_size": 40,
    "sliding_window": 12,
    "v_head_dim": 24,
    "vocab_size": 199,
}
"""Set wherever a configuration has the field, and a value in it."""


class Case(NamedTuple):
    """A checkpoint to make."""

    model_type: str
    """transformers' name."""
    changes: Mapping[str, Any] = MappingProxyType({})
    """Fields of its configuration, beside the sizes above."""
    wider: Mapping[str, float] = MappingProxyType({})
    """What the weights with this in their names are multiplied by: so that clamps clamp, and caps cap."""
    seed: int = 0
    """Of the weights: another one where two logits are nearly the same."""
    by_transformers: bool = True
    """Whether `--model-impl transformers` can compute it, too."""
    lens: tuple[int, ...] = (40, 33, 1, 17, 25)
    """Of the prompts. Where a rotary embedding depends on a text's length, prompts and texts must agree about it:
    the reference computes a text at once, and we go by the prompt."""


def rope(kind: str, theta: float = 10000.0, **settings: Any) -> dict[str, Any]:
    """A configuration's rotary settings."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **settings}}
