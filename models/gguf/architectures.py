"""The architectures of GGUF files: transformers' name of each, and the config.json that its metadata amount to.

Facts that llama.cpp has in its code instead of the file (layer patterns, constants of an architecture) are here, too.
Transformers' defaults are left to the families.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.config.options import ConfigError
from penstock.models.gguf.keys import Keys
from penstock.models.gguf.rope import rope_fields

Fields = dict[str, Any]


class Architecture(NamedTuple):
    """A GGUF architecture in transformers' terms, and how its tensors differ."""

    name: Callable[[Keys], str]
    """Returns the name of transformers' class."""
    fields: Callable[[Keys], Fields]
    """Returns the fields of config.json beyond those of all architectures."""
    pairs_are_neighbours: bool = False
    """Whether rows of q and k are ordered for llama.cpp's rotation of neighbours; transformers rotates halves."""
    norm_offset: float = 0.0
    """The number that the converter added to the weights of norms."""


def config_fields(architecture: Architecture, keys: Keys) -> Fields:
    """Return the whole config.json.

    Raises:
        ConfigError: a key is missing or of another type.
    """
    name = architecture.name(keys)
    hidden_size = keys.whole("embedding_length")
    num_heads = keys.of_all_layers("attention.head_count")
    head_dim = keys.whole("attention.key_length", 0, least=0) or hidden_size // max(num_heads, 1)
    has_bias = keys.has_tensor("blk.0.attn_q.bias") or keys.has_tensor("blk.0.attn_qkv.bias")
    usual: Fields = {
        "architectures": [name],
        "vocab_size": keys.num_rows("token_embd.weight"),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers(keys),
        "intermediate_size": keys.of_all_layers("feed_forward_length", 0) or keys.whole("expert_feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.of_all_layers("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.whole("context_length"),
        "tie_word_embeddings": not keys.has_tensor("output.weight"),
        "attention_bias": has_bias,
        "torch_dtype": keys.dtype,
    }
    if not keys.has("attention.layer_norm_epsilon"):
        usual["rms_norm_eps"] = keys.number("attention.layer_norm_rms_epsilon")
    for field, key in (("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id")):
        if (token_id := keys.token_id(key)) is not None:
            usual[field] = token_id
    return usual | rope_fields(keys, head_dim) | architecture.fields(keys)


def num_layers(keys: Keys) -> int:
    """Return the number of computed layers, without those that predict several tokens at once."""
    return keys.whole("block_count") - keys.whole("nextn_predict_layers", 0, least=0)


def layer_types(keys: Keys, usual: Callable[[int], bool] | None = None) -> Fields:
    """Return the windows and the layers that have them: those that the file names, else those that `usual` selects."""
    window, count = keys.whole("attention.sliding_window", 0, least=0), num_layers(keys)
    if not window:
        return {"sliding_window": None}
    said = keys.raw("attention.sliding_window_pattern")
    if isinstance(said, int) and not isinstance(said, bool) and said > 0:
        slides = [(i + 1) % said != 0 for i in range(count)]
    elif isinstance(said, list) and len(said) >= count:
        slides = [bool(flag) for flag in said[:count]]
    else:
        slides = [usual is None or usual(i) for i in range(count)]
    types = ["sliding_attention" if slide else "full_attention" for slide in slides]
    return {"sliding_window": window, "layer_types": types}


def _named(name: str) -> Callable[[Keys], str]:
    return lambda keys: name


def _llama(keys: Keys) -> str:
    if keys.whole("expert_count", 0, least=0):
        return "MixtralForCausalLM"
    return "MistralForCausalLM" if keys.whole("attention.sliding_window", 0, least=0) else "LlamaForCausalLM"


def _llama_fields(keys: Keys) -> Fields:
    fields: Fields = {"mlp_bias": keys.has_tensor("blk.0.ffn_down.bias")}
    if keys.whole("expert_count", 0, least=0):
        fields |= {
            "num_local_experts": keys.whole("expert_count"),
            "num_experts_per_tok": keys.whole("expert_used_count"),
        }
        if keys.has("expert_feed_forward_length"):
            fields["intermediate_size"] = keys.whole("expert_feed_forward_length")
    return fields | {"sliding_window": keys.whole("attention.sliding_window", 0, least=0) or None}


def _mistral3(keys: Keys) -> Fields:
    scaling = {
        "rope_type": "yarn",
        "rope_theta": keys.number("rope.freq_base", 1e6),
        "factor": keys.number("rope.scaling.factor", 16.0),
        "original_max_position_embeddings": keys.whole("rope.scaling.original_context_length", 16384),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": keys.number("attention.temperature_scale", 0.1),
    }
    return {"rope_parameters": scaling, "rope_scaling": None, "sliding_window": None}


def _qwen2(keys: Keys) -> Fields:
    return {"use_sliding_window": False}


def _experts(keys: Keys) -> Fields:
    return {
        "num_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
    }


def _qwen2moe(keys: Keys) -> Fields:
    shared = {"shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length")}
    has_bias = keys.has_tensor("blk.0.attn_q.bias")
    return _experts(keys) | shared | {"norm_topk_prob": False, "qkv_bias": has_bias, "use_sliding_window": False}


def _qwen3moe(keys: Keys) -> Fields:
    return _experts(keys) | {"norm_topk_prob": True, "use_sliding_window": False}


def _gemma(keys: Keys) -> Fields:
    return {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}


def _gemma2(keys: Keys) -> Fields:
    caps = {
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }
    return _gemma(keys) | caps | _gemma_scale(keys, 46) | layer_types(keys, lambda i: i % 2 == 0)


def _gemma3(keys: Keys) -> Fields:
    local = {"rope_local_base_freq": keys.number("rope.freq_base_swa", 1e4)}
    cap: Fields = {"final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None}
    if not keys.whole("attention.sliding_window", 0, least=0):
        cap["layer_types"] = ["full_attention"] * num_layers(keys)
    return _gemma(keys) | local | cap | _gemma_scale(keys, 62) | layer_types(keys, lambda i: (i + 1) % 6 != 0)


def _gemma_scale(keys: Keys, layers_of_27b: int) -> Fields:
    """Return the scale of scores, which the file lacks: only the 27B models do not derive it from the head size."""
    if keys.whole("block_count") == layers_of_27b:
        return {"query_pre_attn_scalar": keys.whole("embedding_length") // keys.of_all_layers("attention.head_count")}
    return {"query_pre_attn_scalar": keys.whole("attention.key_length", 256)}


def _phi3(keys: Keys) -> Fields:
    window = keys.whole("attention.sliding_window", 0, least=0)
    return {"sliding_window": window or None}


def _gpt_oss(keys: Keys) -> Fields:
    experts = {
        "num_local_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "intermediate_size": keys.whole("expert_feed_forward_length"),
    }
    scaling = rope_fields(keys, keys.head_dim)["rope_scaling"]
    if scaling is not None:
        scaling["truncate"] = False
    return experts | {"rope_scaling": scaling} | layer_types(keys, lambda i: i % 2 == 0)


def _granite(keys: Keys) -> Fields:
    multipliers = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    found: Fields = {field: keys.number(key) for field, key in multipliers.items() if keys.has(key)}
    return (
        {"attention_multiplier": (keys.head_dim) ** -0.5} | found | {"mlp_bias": keys.has_tensor("blk.0.ffn_up.bias")}
    )


def _granitemoe(keys: Keys) -> Fields:
    shared = keys.whole("expert_shared_feed_forward_length", 0, least=0)
    return _granite(keys) | {
        "num_local_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "shared_intermediate_size": shared,
    }


def _stablelm(keys: Keys) -> Fields:
    return {
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "use_parallel_residual": not keys.has_tensor("blk.0.ffn_norm.weight"),
        "use_qkv_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "qk_layernorm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _starcoder2(keys: Keys) -> Fields:
    return {
        "norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "use_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "sliding_window": keys.whole("attention.sliding_window", 0, least=0) or None,
    }


def _command_r(keys: Keys) -> Fields:
    return {
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "logit_scale": keys.number("logit_scale"),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _cohere2(keys: Keys) -> Fields:
    its = {"layer_norm_eps": keys.number("attention.layer_norm_epsilon"), "logit_scale": keys.number("logit_scale")}
    return its | layer_types(keys, lambda i: (i + 1) % 4 != 0)


def _olmo2(keys: Keys) -> Fields:
    return layer_types(keys, lambda i: (i + 1) % 4 != 0)


def _olmo2_name(keys: Keys) -> str:
    return "Olmo3ForCausalLM" if keys.whole("attention.sliding_window", 0, least=0) else "Olmo2ForCausalLM"


def _gpt2(keys: Keys) -> Fields:
    return {
        "n_embd": keys.whole("embedding_length"),
        "n_head": keys.whole("attention.head_count"),
        "n_layer": keys.whole("block_count"),
        "n_inner": keys.whole("feed_forward_length"),
        "n_positions": keys.num_rows("position_embd.weight"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
    }


def _nothing(keys: Keys) -> Fields:
    return {}


def _mlp_bias(keys: Keys) -> Fields:
    return {"mlp_bias": keys.has_tensor("blk.0.ffn_up.bias")}


def _ernie(keys: Keys) -> Fields:
    return {"use_bias": keys.has_tensor("blk.0.attn_q.bias")}


def _seed_oss(keys: Keys) -> Fields:
    return {"attention_out_bias": keys.has_tensor("blk.0.attn_output.bias")} | _mlp_bias(keys)


def _exaone4(keys: Keys) -> Fields:
    return layer_types(keys, lambda i: (i + 1) % 4 != 0)


def _glm4moe(keys: Keys) -> Fields:
    return {
        "n_routed_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "n_shared_experts": keys.whole("expert_shared_count"),
        "first_k_dense_replace": keys.whole("leading_dense_block_count", 0, least=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "n_group": keys.whole("expert_group_count", 1),
        "topk_group": keys.whole("expert_group_used_count", 1),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
        "num_nextn_predict_layers": keys.whole("nextn_predict_layers", 0, least=0),
    }


_DEEPSEEK_SIGMOID = 2
"""The number of sigmoid scoring in `expert_gating_func`."""


def _deepseek2_name(keys: Keys) -> str:
    if keys.whole("leading_dense_block_count", 0, least=0) >= num_layers(keys):
        return "YoutuForCausalLM"
    is_third = keys.whole("expert_gating_func", 0, least=0) == _DEEPSEEK_SIGMOID
    return "DeepseekV3ForCausalLM" if is_third or keys.has_any_tensor(".exp_probs_b.bias") else "DeepseekV2ForCausalLM"


def _deepseek2(keys: Keys) -> Fields:
    """Return DeepSeek's fields. The file has head sizes of latent attention as computed; the model's have "mla"."""
    key_dim = keys.whole("attention.key_length_mla", keys.whole("attention.key_length"))
    rope_dim, groups = keys.whole("rope.dimension_count"), keys.whole("expert_group_count", 1)
    fields: Fields = {
        "head_dim": None,
        "partial_rotary_factor": None,
        "q_lora_rank": keys.whole("attention.q_lora_rank") if keys.has("attention.q_lora_rank") else None,
        "kv_lora_rank": keys.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_dim - rope_dim,
        "v_head_dim": keys.whole("attention.value_length_mla", keys.whole("attention.value_length")),
        "attention_bias": False,
        "first_k_dense_replace": keys.whole("leading_dense_block_count", 0, least=0),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "n_shared_experts": keys.whole("expert_shared_count", 1, least=0) or 1,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm"),
        "n_group": groups,
        "topk_group": keys.whole("expert_group_used_count", 1),
        "topk_method": "noaux_tc",
        "has_split_kv_b": keys.has_tensor("blk.0.attn_k_b.weight"),
    }
    if keys.has("expert_count"):
        fields |= {
            "n_routed_experts": keys.whole("expert_count"),
            "num_experts_per_tok": keys.whole("expert_used_count"),
        }
    if _deepseek2_name(keys) == "DeepseekV2ForCausalLM":
        fields["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    scaling = rope_fields(keys, rope_dim)["rope_scaling"]
    if scaling is not None and keys.has("rope.scaling.yarn_log_multiplier"):
        # The scale of scores and that of cosines and sines are one number; the file has a tenth of it.
        scale = keys.number("rope.scaling.yarn_log_multiplier") * 10
        scaling |= {"mscale": scale, "mscale_all_dim": scale}
    return fields | {"rope_scaling": scaling}


ARCHITECTURES: dict[str, Architecture] = {
    "cohere2": Architecture(_named("Cohere2ForCausalLM"), _cohere2),
    "command-r": Architecture(_named("CohereForCausalLM"), _command_r),
    "deepseek2": Architecture(_deepseek2_name, _deepseek2),
    "ernie4_5": Architecture(_named("Ernie4_5ForCausalLM"), _ernie),
    "exaone4": Architecture(_named("Exaone4ForCausalLM"), _exaone4),
    "gemma": Architecture(_named("GemmaForCausalLM"), _gemma, norm_offset=1.0),
    "gemma2": Architecture(_named("Gemma2ForCausalLM"), _gemma2, norm_offset=1.0),
    "gemma3": Architecture(_named("Gemma3ForCausalLM"), _gemma3, norm_offset=1.0),
    "glm4": Architecture(_named("Glm4ForCausalLM"), _nothing),
    "glm4moe": Architecture(_named("Glm4MoeForCausalLM"), _glm4moe),
    "gpt-oss": Architecture(_named("GptOssForCausalLM"), _gpt_oss),
    "gpt2": Architecture(_named("GPT2LMHeadModel"), _gpt2),
    "granite": Architecture(_named("GraniteForCausalLM"), _granite, pairs_are_neighbours=True),
    "granitemoe": Architecture(_named("GraniteMoeSharedForCausalLM"), _granitemoe, pairs_are_neighbours=True),
    "llama": Architecture(_llama, _llama_fields, pairs_are_neighbours=True),
    "mistral3": Architecture(_named("Ministral3ForCausalLM"), _mistral3, pairs_are_neighbours=True),
    "olmo2": Architecture(_olmo2_name, _olmo2),
    "phi3": Architecture(_named("Phi3ForCausalLM"), _phi3),
    "qwen2": Architecture(_named("Qwen2ForCausalLM"), _qwen2),
    "qwen2moe": Architecture(_named("Qwen2MoeForCausalLM"), _qwen2moe),
    "qwen3": Architecture(_named("Qwen3ForCausalLM"), _qwen2),
    "qwen3moe": Architecture(_named("Qwen3MoeForCausalLM"), _qwen3moe),
    "seed_oss": Architecture(_named("SeedOssForCausalLM"), _seed_oss),
    "smollm3": Architecture(_named("SmolLM3ForCausalLM"), _mlp_bias, pairs_are_neighbours=True),
    "stablelm": Architecture(_named("StableLmForCausalLM"), _stablelm),
    "starcoder2": Architecture(_named("Starcoder2ForCausalLM"), _starcoder2),
}
"""Architectures by `general.architecture`."""


def architecture_of(name: str) -> Architecture:
    """Return an architecture by name; raises ConfigError if it is not supported."""
    found = ARCHITECTURES.get(name)
    if found is None:
        raise ConfigError(
            f"GGUF files of architecture {name[:64]!r} are not supported; supported: {', '.join(ARCHITECTURES)}. "
            "The checkpoint in safetensors that it was made from may be"
        )
    return found
