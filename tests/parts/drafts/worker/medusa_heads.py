"""Heads of Medusa: random ones."""

from typing import Any

import torch
import transformers
from torch import Tensor

_STD = 0.12
NUM_HEADS, NUM_BLOCKS = 3, 2
CONFIG: dict[str, Any] = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "it"}


def heads(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """Random heads, as Medusa names them."""
    generator, hidden = torch.Generator().manual_seed(3), model.config.hidden_size
    tensors = {}
    for head in range(NUM_HEADS):
        for block in range(NUM_BLOCKS):
            tensors[f"{head}.{block}.linear.weight"] = torch.randn(hidden, hidden, generator=generator) * _STD
            tensors[f"{head}.{block}.linear.bias"] = torch.randn(hidden, generator=generator)
        tensors[f"{head}.{NUM_BLOCKS}.weight"] = torch.randn(model.config.vocab_size, hidden, generator=generator)
    return tensors
