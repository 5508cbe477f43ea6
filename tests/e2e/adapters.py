"""Random adapters, as PEFT writes them, and what transformers says with them merged into the model."""

import copy
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

PREFIX = "base_model.model."
MODULES = ("q_proj", "v_proj", "o_proj", "down_proj")


def make_adapter(
    folder: Path, model: transformers.PreTrainedModel, rank: int, seed: int
) -> transformers.PreTrainedModel:
    """Write a random adapter of some of a model's modules; returns the model with the adapter in its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    merged, tensors = copy.deepcopy(model), dict[str, torch.Tensor]()
    for name, module in merged.named_modules():
        if name.rpartition(".")[2] in MODULES and isinstance(module, torch.nn.Linear):
            down = torch.randn(rank, module.in_features, generator=generator) * 0.1
            up = torch.randn(module.out_features, rank, generator=generator) * 0.1
            tensors[f"{PREFIX}{name}.lora_A.weight"], tensors[f"{PREFIX}{name}.lora_B.weight"] = down, up
            with torch.no_grad():
                module.weight += 2.0 * up @ down
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
        "target_modules": [*MODULES], "bias": "none", "lora_dropout": 0.0, "base_model_name_or_path": "tiny",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged
