"""Random checkpoints of architectures that `transformers`' own code computes."""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 512

_SIZES: dict[str, Any] = {
    "attention_chunk_size": 1 << 20,
    "d_model": 64,
    "eos_token_id": 2,
    "ffn_dim": 128,
    "ffn_hidden_size": 128,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "intermediate_size_mlp": 128,
    "kv_lora_rank": 32,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 64,
    "moe_k": 2,
    "moe_num_experts": 4,
    "n_embd": 64,
    "n_group": 1,
    "n_head": 4,
    "n_layer": 4,
    "n_positions": 512,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "pad_token_id": 0,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "shared_expert_intermediate_size": 64,
    "sliding_window": 24,
    "topk_group": 1,
    "v_head_dim": 24,
    "vocab_size": VOCAB_SIZE,
    "word_embed_proj_dim": 64,
}
"""Set wherever a configuration has the field, and a value in it."""

_LATENT: dict[str, Any] = {"num_key_value_heads": 4}
_SIZED: dict[str, Any] = {"head_dim": 16}

MODELS: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": {},
    "ctrl": {},
    "cwm": {},
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "deepseek_v3": {**_LATENT, "n_routed_experts": 8, "n_group": 2},
    "doge": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "flex_olmo": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": _LATENT,
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_oss": {},
    "granite": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "helium": {},
    "hunyuan_v1_dense": _SIZED,
    "hunyuan_v1_moe": _SIZED,
    "jetmoe": {},
    "llama": {},
    "llama4_text": {},
    "mimo_v2_flash": {},
    "minicpm3": _LATENT,
    "minimax_m2": {},
    "ministral": _SIZED,
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "modernbert-decoder": {},
    "nanochat": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "opt": {},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "seed_oss": {},
    "smollm3": {},
    "starcoder2": {},
    "vaultgemma": {},
}
"""Model type -> what its small configuration needs besides."""


def small_config(model_type: str, **changes: Any) -> transformers.PretrainedConfig:
    """The type's own defaults, but four layers of a few thousand weights, with windows shorter than the texts."""
    config = transformers.CONFIG_MAPPING[model_type]()
    for name, value in _SIZES.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if isinstance(listed := getattr(config, name, None), list):
            setattr(config, name, listed[:4])
    for name, value in {"initializer_range": 0.12, **MODELS.get(model_type, {}), **changes}.items():
        setattr(config, name, value)
    return config


def make_checkpoint(folder: Path, model_type: str, **changes: Any) -> transformers.PreTrainedModel:
    """Save a random checkpoint; return `transformers`' model of it, with its own attention, in fp32."""
    torch.manual_seed(len(model_type))
    config = small_config(model_type, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(folder)
    return model  # type: ignore[no-any-return]
