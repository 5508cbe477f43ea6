"""Random checkpoints of every supported architecture, made by transformers itself, and its greedy answers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from penstock.gpu_worker.models.blocks.attention import AttentionBlock
from penstock.gpu_worker.models.decoder import DecoderLayer

VOCAB_SIZE = 199
TRAINED_LEN = 512
_STD = 0.12  # wide enough that the two best logits of a random model are well apart

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TRAINED_LEN,
    "initializer_range": _STD,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha-tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa-biases": ("Llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh", "head_dim": 24}),
    "llama-exact-gelu": ("Llama", {"hidden_act": "gelu"}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama-llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
            }
        },
    ),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 10000.0,
            }
        },
    ),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
    "mistral-no-window": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-some-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen2-yarn": (
        "Qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 1e6,
            }
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-layer-types": (
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def make_checkpoint(folder: Path, name: str, **changes: Any) -> transformers.PreTrainedModel:
    """Save a random checkpoint of a kind in `CONFIGS`; return transformers' model of it, in fp32."""
    family, special = CONFIGS[name]
    config = getattr(transformers, f"{family}Config")(**{**_BASE, **special, **changes})
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(0.0, _STD)
            elif "norm" in key:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model  # type: ignore[no-any-return]


def edit_config(folder: Path, **changes: Any) -> None:
    """Change config.json; None removes a key."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content.update(changes)
    removed = [key for key, value in changes.items() if value is None]
    path.write_text(json.dumps({key: value for key, value in content.items() if key not in removed}))


def prompts(lens: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lens]


@torch.inference_mode()
def greedy_errors(model: Callable[[Tensor], Any], prompt: list[int], output: list[int]) -> tuple[list[int], float]:
    """Where an output is not transformers' greedy choice, and the narrowest gap between its two best logits.

    One pass over the whole text: an output without errors is, by induction, what greedy `generate` gives.
    """
    logits: Tensor = model(torch.tensor([prompt + output[:-1]])).logits[0, -len(output) :]
    best = logits.topk(2, dim=-1)
    gap = float((best.values[:, 0] - best.values[:, 1]).min())
    chosen = torch.tensor(output)
    return (best.indices[:, 0] != chosen).nonzero().squeeze(1).tolist(), gap


def attention_of(layer: DecoderLayer) -> AttentionBlock:
    """The layer's mixer, which must be plain attention."""
    assert isinstance(layer.mixer, AttentionBlock)
    return layer.mixer
