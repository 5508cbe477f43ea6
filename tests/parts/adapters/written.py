"""Adapters as PEFT writes them, of random numbers, and the models that they make."""

import json
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load as read
from safetensors.torch import save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: transformers.PreTrainedModel,
    rank: int = 4,
    modules: Sequence[str] = ALL,
    *,
    seed: int = 0,
    strength: float = 0.5,
    **config: Any,
) -> transformers.PreTrainedModel:
    """Write an adapter of these modules of the model; returns a copy of the model with it in its weights.

    `modules`: last parts of their names, or parts that stand before these.
    """
    generator = torch.Generator().manual_seed(seed)
    merged = deepcopy(model)
    tensors: dict[str, torch.Tensor] = {}
    base: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules)}
    config = base | config
    for name, module in merged.named_modules():
        is_meant = name.rpartition(".")[2] in modules or any(f"{part}." in name for part in modules)
        if not is_meant or not isinstance(module, torch.nn.Linear):
            continue
        outputs, inputs = module.weight.shape
        a = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
        b = torch.randn(outputs, rank, generator=generator) * strength / rank
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        alpha = next((its for key, its in config.get("alpha_pattern", {}).items() if name.endswith(key)), None)
        alpha = config["lora_alpha"] if alpha is None else alpha
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        module.weight.data += scale * (b @ a).to(module.weight.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return merged


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the matrices of a written adapter."""
    path = folder / "adapter_model.safetensors"
    tensors = read(path.read_bytes())
    change(tensors)
    save_file(tensors, path)


def change_config(folder: Path, **changes: Any) -> None:
    """Change fields of a written adapter's configuration."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
