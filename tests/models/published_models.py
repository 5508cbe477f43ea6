"""Published models: what their config.json says that matters, and what their makers say of their size.

Sizes are exact where a model card or the index of its weights gives an exact number, and else as they are printed: "~"
before one whose makers count otherwise, such as without embeddings and with layers for drafts.
Weights that only images, sound or drafts need are not counted.
"""

from typing import Any, NamedTuple


class Published(NamedTuple):
    """A model by its name on the Hugging Face hub."""

    name: str
    architecture: str
    parameters: str
    """Of all weights: "494,032,768", "8.03B" for what rounds to it, or "~355B" for what is within 2 % of it."""
    kv_bytes: int  # of a position, in bf16, as long as every layer keeps it
    fields: dict[str, Any]
    active: str = ""
    """A mixture's parameters that a token is multiplied with; makers count the embedding, the head, both or none."""


def _sizes(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        **more,
    }


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 1024, "vocab_size": 50257}


def _longrope(num_pairs: int) -> dict[str, Any]:
    """Factors of the right number; what they are changes no size."""
    factors = {"type": "longrope", "short_factor": [1.0] * num_pairs, "long_factor": [2.0] * num_pairs}
    return {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_scaling": factors}


_TIED = {"tie_word_embeddings": True}
_GRANITE_4_H = {
    "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    "logits_scaling": 8.0,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "position_embedding_type": "nope",
    **_TIED,
}
_UNTIED = {"tie_word_embeddings": False}
_KIMI_ATTENDS = (4, 8, 12, 16, 20, 24, 27)
_GEMMA4 = {
    "attention_k_eq_v": True,
    "head_dim": 256,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
}
_LLAMA3 = {
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_GPT_OSS: dict[str, Any] = {
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
_OLMO3_SCALING = {
    "rope_type": "yarn",
    "factor": 8.0,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 8192,
}
_DEEPSEEK_SCALING = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
_HUNYUAN_SCALING = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}

_V2 = {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {**_DEEPSEEK_SCALING, "mscale": 0.707, "mscale_all_dim": 0.707},
    "scoring_func": "softmax",
    "v_head_dim": 128,
}
_V3 = {"max_position_embeddings": 131072, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}

_QWEN3_30B = _sizes(
    2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    norm_topk_prob=True,
)  # fmt: skip
PUBLISHED = (
    # Llama, Mistral, Qwen
    Published(
        "meta-llama/Llama-3.1-8B", "LlamaForCausalLM", "8,030,261,248", 131072,
        _sizes(4096, 14336, 32, 32, 8, 128256, **_LLAMA3),
    ),
    Published(
        "meta-llama/Llama-3.2-1B", "LlamaForCausalLM", "1,235,814,400", 32768,
        _sizes(2048, 8192, 16, 32, 8, 128256, head_dim=64, **_LLAMA3, **_TIED),
    ),
    Published(
        "meta-llama/Llama-3.1-70B", "LlamaForCausalLM", "70,553,706,496", 327680,
        _sizes(8192, 28672, 80, 64, 8, 128256, **_LLAMA3),
    ),
    Published(
        "meta-llama/Llama-2-7b-hf", "LlamaForCausalLM", "6,738,415,616", 524288, _sizes(4096, 11008, 32, 32, 32, 32000)
    ),
    Published(
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "LlamaForCausalLM", "1,100,048,384", 22528,
        _sizes(2048, 5632, 22, 32, 4, 32000),
    ),
    Published(
        "HuggingFaceTB/SmolLM2-135M", "LlamaForCausalLM", "134,515,008", 23040,
        _sizes(576, 1536, 30, 9, 3, 49152, **_TIED),
    ),
    Published(
        "mistralai/Mistral-7B-v0.1", "MistralForCausalLM", "7,241,732,096", 131072,
        _sizes(4096, 14336, 32, 32, 8, 32000, sliding_window=4096),
    ),
    Published(
        "mistralai/Mistral-Nemo-Instruct-2407", "MistralForCausalLM", "12,247,782,400", 163840,
        _sizes(5120, 14336, 40, 32, 8, 131072, head_dim=128, sliding_window=None),
    ),
    Published(
        "mistralai/Mistral-Small-24B-Instruct-2501", "MistralForCausalLM", "23,572,403,200", 163840,
        _sizes(5120, 32768, 40, 32, 8, 131072, head_dim=128, sliding_window=None),
    ),
    Published(
        "Qwen/Qwen2.5-0.5B-Instruct", "Qwen2ForCausalLM", "494,032,768", 12288,
        _sizes(896, 4864, 24, 14, 2, 151936, sliding_window=32768, use_sliding_window=False, **_TIED),
    ),
    Published(
        "Qwen/Qwen2.5-7B-Instruct", "Qwen2ForCausalLM", "7,615,616,512", 57344,
        _sizes(3584, 18944, 28, 28, 4, 152064, sliding_window=131072, use_sliding_window=False),
    ),
    Published(
        "Qwen/Qwen2.5-72B-Instruct", "Qwen2ForCausalLM", "72,706,203,648", 327680,
        _sizes(8192, 29568, 80, 64, 8, 152064, sliding_window=131072, use_sliding_window=False),
    ),
    Published(
        "Qwen/Qwen3-0.6B", "Qwen3ForCausalLM", "596,049,920", 114688,
        _sizes(1024, 3072, 28, 16, 8, 151936, head_dim=128, **_TIED),
    ),
    Published(
        "Qwen/Qwen3-8B", "Qwen3ForCausalLM", "8,190,735,360", 147456,
        _sizes(4096, 12288, 36, 32, 8, 151936, head_dim=128),
    ),
    Published(
        "Qwen/Qwen3-32B", "Qwen3ForCausalLM", "32.8B", 262144, _sizes(5120, 25600, 64, 64, 8, 151936, head_dim=128)
    ),
    # gpt-oss
    Published(
        "openai/gpt-oss-20b", "GptOssForCausalLM", "20.9B", 49152,
        _sizes(2880, 2880, 24, 64, 8, 201088, num_local_experts=32, **_GPT_OSS),
        "3.6B",
    ),
    Published(
        "openai/gpt-oss-120b", "GptOssForCausalLM", "116.8B", 73728,
        _sizes(2880, 2880, 36, 64, 8, 201088, num_local_experts=128, **_GPT_OSS),
        "5.1B",
    ),
    # Mixtures of Qwen and Mistral
    Published("Qwen/Qwen3-30B-A3B", "Qwen3MoeForCausalLM", "30,532,122,624", 98304, _QWEN3_30B, "~3.3B"),
    Published(
        "Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen3VLMoeTextModel", "30,532,122,624", 98304, _QWEN3_30B, "~3.3B",
    ),
    Published(
        "Qwen/Qwen3-235B-A22B", "Qwen3MoeForCausalLM", "235B", 192512,
        _sizes(
            4096, 12288, 94, 64, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=1536, norm_topk_prob=True,
        ),
        "22B",
    ),
    Published(
        "Qwen/Qwen1.5-MoE-A2.7B-Chat", "Qwen2MoeForCausalLM", "14,315,784,192", 196608,
        _sizes(
            2048, 5632, 24, 16, 16, 151936, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632, use_sliding_window=False,
        ),
        "2.7B",
    ),
    Published(
        "Qwen/Qwen2-57B-A14B-Instruct", "Qwen2MoeForCausalLM", "57.4B", 57344,
        _sizes(
            3584, 18944, 28, 28, 4, 151936, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=2560,
            shared_expert_intermediate_size=20480, use_sliding_window=False,
        ),
        "14B",
    ),
    Published(
        "mistralai/Mixtral-8x7B-Instruct-v0.1", "MixtralForCausalLM", "46,702,792,704", 131072,
        _sizes(4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
        "12.9B",
    ),
    Published(
        "mistralai/Mixtral-8x22B-v0.1", "MixtralForCausalLM", "141B", 229376,
        _sizes(6144, 16384, 56, 48, 8, 32000, num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
        "39B",
    ),
    # Gemma
    Published(
        "google/gemma-2b", "GemmaForCausalLM", "2,506,172,416", 18432,
        _sizes(2048, 16384, 18, 8, 1, 256000, head_dim=256),
    ),
    Published(
        "google/gemma-7b", "GemmaForCausalLM", "8,537,680,896", 458752,
        _sizes(3072, 24576, 28, 16, 16, 256000, head_dim=256),
    ),
    Published(
        "google/gemma-2-2b-it", "Gemma2ForCausalLM", "2,614,341,888", 106496,
        _sizes(2304, 9216, 26, 8, 4, 256000, head_dim=256, query_pre_attn_scalar=256, sliding_window=4096),
    ),
    Published(
        "google/gemma-2-9b-it", "Gemma2ForCausalLM", "9,241,705,984", 344064,
        _sizes(3584, 14336, 42, 16, 8, 256000, head_dim=256, query_pre_attn_scalar=256, sliding_window=4096),
    ),
    Published(
        "google/gemma-2-27b-it", "Gemma2ForCausalLM", "27,227,128,320", 376832,
        _sizes(4608, 36864, 46, 32, 16, 256000, head_dim=128, query_pre_attn_scalar=144, sliding_window=4096),
    ),
    Published(
        "google/gemma-3-270m-it", "Gemma3ForCausalLM", "268,098,176", 18432,
        _sizes(640, 2048, 18, 4, 1, 262144, head_dim=256, sliding_window=512, query_pre_attn_scalar=256),
    ),
    Published(
        "google/gemma-3-1b-it", "Gemma3ForCausalLM", "999,885,952", 26624,
        _sizes(1152, 6912, 26, 4, 1, 262144, head_dim=256, sliding_window=512, query_pre_attn_scalar=256),
    ),
    # Gemma 4, without what only images and sound need
    Published(
        "google/gemma-4-E2B-it", "Gemma4ForCausalLM", "~4.65B", 18432,
        _sizes(
            1536, 6144, 35, 8, 1, 262144, head_dim=256, num_kv_shared_layers=20, use_double_wide_mlp=True,
            layer_types=["sliding_attention" if (i + 1) % 5 else "full_attention" for i in range(35)],
        ),
    ),
    Published(
        "google/gemma-4-E4B-it", "Gemma4ForCausalLM", "~7.5B", 57344,
        _sizes(2560, 10240, 42, 8, 2, 262144, head_dim=256, num_kv_shared_layers=18),
    ),
    Published(
        "google/gemma-4-26B-A4B-it", "Gemma4ForCausalLM", "25.2B", 225280,
        _sizes(2816, 2112, 30, 16, 8, 262144, **_GEMMA4, enable_moe_block=True, num_experts=128, top_k_experts=8,
               moe_intermediate_size=704, num_global_key_value_heads=2), "3.8B",
    ),
    Published(
        "google/gemma-4-31B-it", "Gemma4ForCausalLM", "30.7B", 901120,
        _sizes(5376, 21504, 60, 32, 16, 262144, **_GEMMA4, num_global_key_value_heads=4),
    ),
    # Phi
    Published(
        "microsoft/Phi-3-mini-4k-instruct", "Phi3ForCausalLM", "3,821,079,552", 393216,
        _sizes(3072, 8192, 32, 32, 32, 32064, sliding_window=2047, max_position_embeddings=4096),
    ),
    Published(
        "microsoft/Phi-3.5-mini-instruct", "Phi3ForCausalLM", "3,821,079,552", 393216,
        _sizes(3072, 8192, 32, 32, 32, 32064, sliding_window=262144, **_longrope(48)),
    ),
    Published(
        "microsoft/Phi-3-medium-128k-instruct", "Phi3ForCausalLM", "13,960,238,080", 204800,
        _sizes(5120, 17920, 40, 40, 10, 32064, sliding_window=131072, **_longrope(64)),
    ),
    Published(
        "microsoft/phi-4", "Phi3ForCausalLM", "14,659,507,200", 204800,
        _sizes(5120, 17920, 40, 40, 10, 100352, sliding_window=None, max_position_embeddings=16384),
    ),
    Published(
        "microsoft/Phi-4-mini-instruct", "Phi3ForCausalLM", "3,836,021,760", 131072,
        _sizes(
            3072, 8192, 32, 24, 8, 200064, sliding_window=262144, partial_rotary_factor=0.75, **_longrope(48), **_TIED
        ),
    ),
    # MiniMax
    Published(
        "MiniMaxAI/MiniMax-M2", "MiniMaxM2ForCausalLM", "~230B", 253952,
        _sizes(
            3072, 1536, 62, 48, 8, 200064, head_dim=128, rotary_dim=64, num_local_experts=256, num_experts_per_tok=8,
            rope_theta=5000000, **_UNTIED,
        ),
        "10B",
    ),
    # Llama 4, its text model
    Published(
        "meta-llama/Llama-4-Scout-17B-16E (text)", "Llama4ForCausalLM", "~109B", 196608,
        _sizes(
            5120, 8192, 48, 40, 8, 202048, head_dim=128, intermediate_size_mlp=16384, num_local_experts=16,
            num_experts_per_tok=1, interleave_moe_layer_step=1, rope_theta=500000.0,
            rope_scaling={
                "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        "17B",
    ),
    Published(
        "meta-llama/Llama-4-Maverick-17B-128E (text)", "Llama4ForCausalLM", "~400B", 196608,
        _sizes(
            5120, 8192, 48, 40, 8, 202048, head_dim=128, intermediate_size_mlp=16384, num_local_experts=128,
            num_experts_per_tok=1, interleave_moe_layer_step=2, use_qk_norm=False, rope_theta=500000.0,
        ),
        "17B",
    ),
    # ERNIE
    Published(
        "baidu/ERNIE-4.5-0.3B-PT", "Ernie4_5ForCausalLM", "360,748,032", 18432,
        _sizes(1024, 3072, 18, 16, 2, 103424, head_dim=128, **_TIED),
    ),
    Published(
        "baidu/ERNIE-4.5-21B-A3B-PT", "Ernie4_5_MoeForCausalLM", "21.8B", 57344,
        _sizes(
            2560, 12288, 28, 20, 4, 103424, moe_num_experts=64, moe_k=6, moe_intermediate_size=1536,
            moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=27, moe_layer_interval=1, **_TIED,
        ),
        "3B",
    ),
    Published(
        "baidu/ERNIE-4.5-300B-A47B-PT", "Ernie4_5_MoeForCausalLM", "~300B", 221184,
        _sizes(
            8192, 28672, 54, 64, 8, 103424, moe_num_experts=64, moe_k=8, moe_intermediate_size=3584,
            moe_num_shared_experts=0, moe_layer_start_index=3, moe_layer_end_index=53, moe_layer_interval=1, **_UNTIED,
        ),
        "47B",
    ),
    # GLM
    Published(
        "THUDM/glm-4-9b-chat-hf", "GlmForCausalLM", "9.40B", 40960,
        _sizes(4096, 13696, 40, 32, 2, 151552, head_dim=128, attention_bias=True),
    ),
    Published(
        "zai-org/GLM-4-9B-0414", "Glm4ForCausalLM", "9,400,279,040", 40960,
        _sizes(4096, 13696, 40, 32, 2, 151552, head_dim=128, attention_bias=True, partial_rotary_factor=0.5),
    ),
    Published(
        "zai-org/GLM-4-32B-0414", "Glm4ForCausalLM", "32.6B", 62464,
        _sizes(6144, 23040, 61, 48, 2, 151552, head_dim=128, attention_bias=False, partial_rotary_factor=0.5),
    ),
    Published(
        "zai-org/GLM-4.5-Air", "Glm4MoeForCausalLM", "~106B", 188416,
        _sizes(
            4096, 10944, 46, 96, 8, 151552, head_dim=128, attention_bias=True, use_qk_norm=False, n_routed_experts=128,
            moe_intermediate_size=1408, num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=1,
        ),
        "12B",
    ),
    Published(
        "zai-org/GLM-4.5", "Glm4MoeForCausalLM", "~355B", 376832,
        _sizes(
            5120, 12288, 92, 96, 8, 151552, head_dim=128, attention_bias=True, use_qk_norm=True, n_routed_experts=160,
            moe_intermediate_size=1536, num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=3,
            routed_scaling_factor=2.5,
        ),
        "32B",
    ),
    # OLMo
    Published(
        "allenai/OLMo-2-0425-1B", "Olmo2ForCausalLM", "1,484,916,736", 131072,
        _sizes(2048, 8192, 16, 16, 16, 100352, rope_theta=500000),
    ),
    Published(
        "allenai/OLMo-2-1124-7B", "Olmo2ForCausalLM", "7,298,617,344", 524288,
        _sizes(4096, 11008, 32, 32, 32, 100352, rope_theta=500000),
    ),
    Published(
        "allenai/OLMo-2-0325-32B", "Olmo2ForCausalLM", "32,234,279,936", 262144,
        _sizes(5120, 27648, 64, 40, 8, 100352, rope_theta=500000),
    ),
    Published(
        "allenai/Olmo-3-7B-Instruct", "Olmo3ForCausalLM", "7.30B", 524288,
        _sizes(4096, 11008, 32, 32, 32, 100278, rope_theta=500000, sliding_window=4096, rope_scaling=_OLMO3_SCALING),
    ),
    # Granite
    Published(
        "ibm-granite/granite-3.1-2b-instruct", "GraniteForCausalLM", "2,533,531,648", 81920,
        _sizes(
            2048, 8192, 40, 32, 8, 49155, embedding_multiplier=12.0, attention_multiplier=0.015625, logits_scaling=8.0,
            residual_multiplier=0.22, **_TIED,
        ),
    ),
    Published(
        "ibm-granite/granite-3.1-8b-instruct", "GraniteForCausalLM", "8,170,848,256", 163840,
        _sizes(
            4096, 12800, 40, 32, 8, 49155, embedding_multiplier=12.0, attention_multiplier=0.0078125,
            logits_scaling=16.0, residual_multiplier=0.22, **_TIED,
        ),
    ),
    Published(
        "ibm-granite/granite-3.1-3b-a800m-instruct", "GraniteMoeForCausalLM", "3.3B", 65536,
        _sizes(1536, 512, 32, 24, 8, 49155, num_local_experts=40, num_experts_per_tok=8, logits_scaling=6.0, **_TIED),
        "0.8B",
    ),
    Published(
        "ibm-granite/granite-4.0-micro", "GraniteMoeHybridForCausalLM", "3.40B", 81920,
        _sizes(
            2560, 8192, 40, 40, 8, 100352, shared_intermediate_size=8192, num_local_experts=0, logits_scaling=10.0,
            layer_types=["attention"] * 40, position_embedding_type="rope", **_TIED,
        ),
    ),
    Published(
        "ibm-granite/granite-4.0-h-micro", "GraniteMoeHybridForCausalLM", "3,191,396,096", 8192,
        _sizes(
            2048, 8192, 40, 32, 8, 100352, shared_intermediate_size=8192, num_local_experts=0, mamba_n_heads=64,
            **_GRANITE_4_H,
        ),
    ),
    Published(
        "ibm-granite/granite-4.0-h-tiny", "GraniteMoeHybridForCausalLM", "6.9B", 8192,
        _sizes(
            1536, 512, 40, 12, 4, 100352, shared_intermediate_size=1024, num_local_experts=64, num_experts_per_tok=6,
            mamba_n_heads=48, **_GRANITE_4_H,
        ),
        "1B",
    ),
    Published(
        "ibm-granite/granite-4.0-h-small", "GraniteMoeHybridForCausalLM", "32B", 16384,
        _sizes(
            4096, 768, 40, 32, 8, 100352, shared_intermediate_size=1536, num_local_experts=72, num_experts_per_tok=10,
            mamba_n_heads=128, **_GRANITE_4_H,
        ),
        "9B",
    ),
    # Bamba
    Published(
        "ibm-ai-platform/Bamba-9B-v1", "BambaForCausalLM", "9.78B", 12288,
        _sizes(
            4096, 14336, 32, 32, 8, 128256, mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128,
            attn_layer_indices=[9, 18, 27],
        ),
    ),
    # LFM 2
    Published(
        "LiquidAI/LFM2-350M", "Lfm2ForCausalLM", "354,483,968", 12288,
        _sizes(1024, 6656, 16, 16, 8, 65536, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
    ),
    Published(
        "LiquidAI/LFM2-1.2B", "Lfm2ForCausalLM", "1,170,340,608", 12288,
        _sizes(2048, 12288, 16, 32, 8, 65536, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
    ),
    Published(
        "LiquidAI/LFM2-2.6B", "Lfm2ForCausalLM", "2.57B", 16384,
        _sizes(
            2048, 10752, 30, 32, 8, 65536, block_auto_adjust_ff_dim=False,
            full_attn_idxs=[2, 6, 9, 13, 17, 21, 24, 27],
        ),
    ),
    Published(
        "LiquidAI/LFM2-8B-A1B", "Lfm2MoeForCausalLM", "8.34B", 12288,
        _sizes(
            2048, 7168, 24, 32, 8, 65536,
            layer_types=["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
        ),
        "~1.55B",  # they say 1.5B
    ),
    # Qwen3-Next, Qwen3.5
    Published(
        "Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen3NextForCausalLM", "80B", 24576,
        _sizes(2048, 5120, 48, 16, 2, 151936), "3B",
    ),
    Published(
        "Qwen/Qwen3.5-9B", "Qwen3_5ForCausalLM", "9B", 32768, _sizes(4096, 12288, 32, 16, 4, 248320, **_UNTIED)
    ),
    Published(
        "Qwen/Qwen3.5-27B", "Qwen3_5ForCausalLM", "27B", 65536,
        _sizes(5120, 17408, 64, 24, 4, 248320, linear_num_value_heads=48, **_UNTIED),
    ),
    Published(
        "Qwen/Qwen3.5-35B-A3B", "Qwen3_5MoeForCausalLM", "35B", 20480,
        _sizes(2048, 5120, 40, 16, 2, 248320, **_UNTIED), "3B",
    ),
    Published(
        "Qwen/Qwen3.5-397B-A17B", "Qwen3_5MoeForCausalLM", "~397B", 30720,
        _sizes(
            4096, 5120, 60, 32, 2, 248320, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=1024,
            shared_expert_intermediate_size=1024, linear_num_value_heads=64, **_UNTIED,
        ),
        "17B",
    ),
    # OLMo Hybrid
    Published(
        "allenai/Olmo-Hybrid-7B", "OlmoHybridForCausalLM", "7B", 122880,
        _sizes(3840, 11008, 32, 30, 30, 100352, rope_theta=None),
    ),
    # Kimi Linear
    Published(
        "moonshotai/Kimi-Linear-48B-A3B-Instruct", "KimiLinearForCausalLM", "49B", 8064,  # on the hub
        _sizes(
            2304, 9216, 27, 32, 32, 163840, head_dim=72, linear_attn_config={
                "full_attn_layers": list(_KIMI_ATTENDS), "head_dim": 128,
                "kda_layers": [i for i in range(1, 28) if i not in _KIMI_ATTENDS], "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
        ),
        "3B",
    ),
    # Mamba 1: alone, and in Jamba
    Published(
        "state-spaces/mamba-2.8b-hf", "MambaForCausalLM", "2.77B", 0,
        {"hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50280},
    ),
    Published(
        "tiiuae/falcon-mamba-7b", "FalconMambaForCausalLM", "7.27B", 0,
        {"hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 65024, **_UNTIED},
    ),
    Published(
        "ai21labs/Jamba-v0.1", "JambaForCausalLM", "51.6B", 16384, _sizes(4096, 14336, 32, 32, 8, 65536), "12B"
    ),
    # Mamba 2, Falcon-H1, Nemotron-H
    Published(
        "mistralai/Mamba-Codestral-7B-v0.1", "Mamba2ForCausalLM", "7,285,403,648", 0,
        {"hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 32768},
    ),
    Published(
        "tiiuae/Falcon-H1-0.5B-Instruct", "FalconH1ForCausalLM", "521,411,104", 18432,
        _sizes(
            1024, 2048, 36, 8, 2, 32784, head_dim=64, mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64,
            mamba_d_state=128,
        ),
    ),
    Published(
        "tiiuae/Falcon-H1-7B-Instruct", "FalconH1ForCausalLM", "7.59B", 45056,
        _sizes(
            3072, 12288, 44, 12, 2, 130049, head_dim=128, mamba_d_ssm=3072, mamba_n_heads=24, mamba_d_head=128,
            mamba_d_state=256,
        ),
    ),
    Published(
        "nvidia/Nemotron-H-8B-Base-8K", "NemotronHForCausalLM", "8.1B", 16384,
        _sizes(
            4096, 21504, 52, 32, 8, 131072,
            hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        ),
    ),
    Published(
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2", "NemotronHForCausalLM", "8.89B", 16384,
        _sizes(
            4480, 15680, 56, 40, 8, 131072, head_dim=128, mamba_head_dim=80,
            hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        ),
    ),
    Published(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B", "NemotronHForCausalLM", "31.6B", 6144,
        _sizes(
            2688, 1856, 52, 32, 2, 131072, head_dim=128, mamba_num_heads=64, mamba_head_dim=64, n_routed_experts=128,
            num_experts_per_tok=6, moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
            routed_scaling_factor=2.5, **_UNTIED,
            hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        ),
        "~3.6B",
    ),
    # Cohere
    Published(
        "CohereForAI/c4ai-command-r-v01", "CohereForCausalLM", "34,980,831,232", 1310720,
        _sizes(8192, 22528, 40, 64, 64, 256000, max_position_embeddings=8192, model_max_length=131072),
    ),
    Published(
        "CohereForAI/c4ai-command-r-plus", "CohereForCausalLM", "103,810,674,688", 262144,
        _sizes(12288, 33792, 64, 96, 8, 256000, use_qk_norm=True, logit_scale=0.8333),
    ),
    Published(
        "CohereForAI/aya-23-8B", "CohereForCausalLM", "8,028,033,024", 131072, _sizes(4096, 14336, 32, 32, 8, 256000)
    ),
    Published(
        "CohereForAI/c4ai-command-r7b-12-2024", "Cohere2ForCausalLM", "8.03B", 131072,
        _sizes(4096, 14336, 32, 32, 8, 256000, logit_scale=0.25, sliding_window=4096, sliding_window_pattern=4),
    ),
    Published(
        "CohereForAI/c4ai-command-a-03-2025", "Cohere2ForCausalLM", "111B", 262144,
        _sizes(12288, 36864, 64, 96, 8, 256000, logit_scale=0.25, sliding_window=4096, sliding_window_pattern=4),
    ),
    # EXAONE, SmolLM, Nemotron
    Published(
        "LGAI-EXAONE/EXAONE-4.0-1.2B", "Exaone4ForCausalLM", "1.28B", 61440,
        _sizes(2048, 4096, 30, 32, 8, 102400, head_dim=64, sliding_window=None, **_TIED),
    ),
    Published(
        "LGAI-EXAONE/EXAONE-4.0-32B", "Exaone4ForCausalLM", "32.0B", 262144,
        _sizes(
            5120, 27392, 64, 40, 8, 102400, head_dim=128, sliding_window=4096, sliding_window_pattern="LLLG",
        ),
    ),
    Published(
        "HuggingFaceTB/SmolLM3-3B", "SmolLM3ForCausalLM", "3,075,098,624", 73728,
        _sizes(2048, 11008, 36, 16, 4, 128256, rope_theta=5000000.0, no_rope_layers=[1, 1, 1, 0] * 9),
    ),
    Published(
        "nvidia/Minitron-4B-Base", "NemotronForCausalLM", "4.19B", 131072,
        _sizes(3072, 9216, 32, 24, 8, 256000, head_dim=128, hidden_act="relu2", partial_rotary_factor=0.5),
    ),
    # StableLM, GPT-NeoX, Phi
    Published(
        "stabilityai/stablelm-3b-4e1t", "StableLmForCausalLM", "2,795,443,200", 327680,
        _sizes(2560, 6912, 32, 32, 32, 50304, partial_rotary_factor=0.25),
    ),
    Published(
        "stabilityai/stablelm-2-1_6b", "StableLmForCausalLM", "1,644,515,328", 196608,
        _sizes(2048, 5632, 24, 32, 32, 100352, use_qkv_bias=True),
    ),
    Published(
        "stabilityai/stablelm-2-12b", "StableLmForCausalLM", "12.1B", 204800,
        _sizes(5120, 13824, 40, 32, 8, 100352, qk_layernorm=True, use_parallel_residual=True),
    ),
    Published(
        "tiiuae/falcon-7b", "FalconForCausalLM", "~7B", 8192,
        {
            "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024,
            "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "bias": False,
        },
    ),
    Published(
        "tiiuae/falcon-40b", "FalconForCausalLM", "~41.8B", 122880,  # printed as 40B
        {
            "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
            "vocab_size": 65024, "new_decoder_architecture": True, "bias": False,
        },
    ),
    Published(
        "EleutherAI/gpt-j-6b", "GPTJForCausalLM", "6.05B", 458752,
        {"n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048, "rotary_dim": 64, "vocab_size": 50400},
    ),
    Published(
        "EleutherAI/gpt-neo-125m", "GPTNeoForCausalLM", "125,198,592", 36864,
        {
            "hidden_size": 768, "num_layers": 12, "num_heads": 12, "max_position_embeddings": 2048,
            "window_size": 256, "vocab_size": 50257,
        },
    ),
    Published(
        "EleutherAI/gpt-neox-20b", "GPTNeoXForCausalLM", "20,554,567,680", 1081344,
        _sizes(6144, 24576, 44, 64, 64, 50432, rotary_pct=0.25, hidden_act="gelu_fast"),
    ),
    Published(
        "EleutherAI/pythia-160m", "GPTNeoXForCausalLM", "162,322,944", 36864,
        _sizes(768, 3072, 12, 12, 12, 50304, rotary_pct=0.25),
    ),
    Published(
        "EleutherAI/pythia-6.9b", "GPTNeoXForCausalLM", "6,857,302,016", 524288,
        _sizes(4096, 16384, 32, 32, 32, 50432, rotary_pct=0.25),
    ),
    Published(
        "microsoft/phi-1_5", "PhiForCausalLM", "1,418,270,720", 196608,
        _sizes(2048, 8192, 24, 32, 32, 51200, partial_rotary_factor=0.5),
    ),
    Published(
        "microsoft/phi-2", "PhiForCausalLM", "2,779,683,840", 327680,
        _sizes(2560, 10240, 32, 32, 32, 51200, partial_rotary_factor=0.4),
    ),
    # StarCoder, GPT-2, OPT
    Published(
        "bigcode/starcoder2-3b", "Starcoder2ForCausalLM", "3,030,371,328", 30720,
        _sizes(3072, 12288, 30, 24, 2, 49152, sliding_window=4096),
    ),
    Published(
        "bigcode/starcoder2-15b", "Starcoder2ForCausalLM", "15,957,889,024", 81920,
        _sizes(6144, 24576, 40, 48, 4, 49152, sliding_window=4096, **_UNTIED),
    ),
    Published("openai-community/gpt2", "GPT2LMHeadModel", "124,439,808", 36864, _gpt2(768, 12, 12)),
    Published("openai-community/gpt2-xl", "GPT2LMHeadModel", "1,557,611,200", 307200, _gpt2(1600, 48, 25)),
    Published(
        "facebook/opt-125m", "OPTForCausalLM", "125,239,296", 36864,
        _sizes(768, 3072, 12, 12, 12, 50272, ffn_dim=3072, max_position_embeddings=2048),
    ),
    Published(
        "facebook/opt-6.7b", "OPTForCausalLM", "6,658,473,984", 524288,
        _sizes(4096, 16384, 32, 32, 32, 50272, ffn_dim=16384, max_position_embeddings=2048),
    ),
    # Ministral, Seed-OSS, Hunyuan
    Published(
        "mistralai/Ministral-3-8B-Instruct-2512 (text)", "Ministral3ForCausalLM", "8.5B", 139264,
        _sizes(4096, 14336, 34, 32, 8, 131072, head_dim=128),
    ),
    Published(
        "mistralai/Ministral-3-3B-Instruct-2512 (text)", "Ministral3ForCausalLM", "3.4B", 106496,
        _sizes(3072, 9216, 26, 32, 8, 131072, head_dim=128, **_TIED),
    ),
    Published(
        "ByteDance-Seed/Seed-OSS-36B-Instruct", "SeedOssForCausalLM", "36.2B", 262144,
        _sizes(5120, 27648, 64, 80, 8, 155136, head_dim=128),
    ),
    Published(
        "tencent/Hunyuan-7B-Instruct", "HunYuanDenseV1ForCausalLM", "7.50B", 131072,
        _sizes(4096, 14336, 32, 32, 8, 128167, head_dim=128, rope_scaling=_HUNYUAN_SCALING, **_TIED),
    ),
    Published(
        "tencent/Hunyuan-0.5B-Instruct", "HunYuanDenseV1ForCausalLM", "0.54B", 98304,
        _sizes(1024, 3584, 24, 16, 8, 120818, head_dim=128, rope_scaling=_HUNYUAN_SCALING, **_TIED),
    ),
    # Latent attention
    Published(
        "deepseek-ai/DeepSeek-V2-Lite", "DeepseekV2ForCausalLM", "15,706,484,224", 31104,
        _sizes(
            2048, 10944, 27, 16, 16, 102400, **_V2, q_lora_rank=None, moe_intermediate_size=1408, n_routed_experts=64,
            topk_method="greedy", routed_scaling_factor=1.0,
        ), "~2.45B",  # printed as 2.4B
    ),
    Published(
        "deepseek-ai/DeepSeek-V2", "DeepseekV2ForCausalLM", "235,741,434,880", 69120,
        _sizes(
            5120, 12288, 60, 128, 128, 102400, **_V2, q_lora_rank=1536, moe_intermediate_size=1536,
            n_routed_experts=160, topk_method="group_limited_greedy", n_group=8, topk_group=3,
            routed_scaling_factor=16.0,
        ), "21B",
    ),
    Published(
        "deepseek-ai/DeepSeek-V3", "DeepseekV3ForCausalLM", "671B", 70272,
        _sizes(7168, 18432, 61, 128, 128, 129280, **_V3, rope_scaling=_DEEPSEEK_SCALING), "37B",
    ),
    Published(
        "deepseek-ai/DeepSeek-V3.2", "DeepseekV32ForCausalLM", "~671B", 85888,  # printed with what only drafts need
        _sizes(
            7168, 18432, 61, 128, 128, 129280, **_V3, rope_scaling=_DEEPSEEK_SCALING, index_n_heads=64,
            index_head_dim=128, index_topk=2048,
        ), "37B",
    ),
    Published(
        "zai-org/GLM-5", "GlmMoeDsaForCausalLM", "~744B", 109824,
        _sizes(
            6144, 12288, 78, 64, 64, 154880, kv_lora_rank=512, q_lora_rank=2048, qk_nope_head_dim=192,
            qk_rope_head_dim=64, v_head_dim=256, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1,
            num_experts_per_tok=8, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5,
            first_k_dense_replace=3, num_nextn_predict_layers=1, index_n_heads=32, index_head_dim=128, index_topk=2048,
        ), "40B",
    ),
    Published(
        "moonshotai/Kimi-K2-Instruct", "DeepseekV3ForCausalLM", "~1026B", 70272,
        _sizes(
            7168, 18432, 61, 64, 64, 163840, **_V3 | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
            n_routed_experts=384, routed_scaling_factor=2.827, num_nextn_predict_layers=0,
            rope_scaling={**_DEEPSEEK_SCALING, "factor": 32.0, "beta_fast": 1.0},
        ), "32B",
    ),
    Published(
        "moonshotai/Moonlight-16B-A3B", "DeepseekV3ForCausalLM", "15.96B", 31104,
        _sizes(
            2048, 11264, 27, 16, 16, 163840, **_V3 | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
            q_lora_rank=None, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
            moe_intermediate_size=1408, routed_scaling_factor=2.446,
        ), "2.24B",
    ),
    Published(
        "zai-org/GLM-4.7-Flash", "Glm4MoeLiteForCausalLM", "30B", 54144,
        _sizes(
            2048, 10240, 47, 20, 20, 154880, kv_lora_rank=512, q_lora_rank=768, qk_nope_head_dim=192,
            qk_rope_head_dim=64, v_head_dim=256, moe_intermediate_size=1536, n_routed_experts=64, n_shared_experts=1,
            num_experts_per_tok=4, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.8,
            first_k_dense_replace=1, num_nextn_predict_layers=1, topk_method="noaux_tc", partial_rotary_factor=1.0,
        ), "3B",
    ),
    Published(
        "tencent/Youtu-LLM-2B", "YoutuForCausalLM", "1.96B", 36864,
        _sizes(
            2048, 6144, 32, 16, 16, 128256, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128,
            qk_rope_head_dim=64, v_head_dim=128, rope_interleave=True, rope_theta=1600000, **_TIED,
        ),
    ),
)  # fmt: skip
