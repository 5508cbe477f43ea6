"""The model whose tokens are guessed: its features, and what it makes of them."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM


class Target:
    """A Llama with all weights fixed, fp32."""

    def __init__(self, folder: Path) -> None:
        loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        loaded.requires_grad_(False)
        self._trunk: nn.Module = loaded.model
        self.config: LlamaConfig = loaded.config
        self.norm: Tensor = loaded.get_parameter("model.norm.weight")  # [H], about the size of features
        self.embedding: Tensor = loaded.get_parameter("model.embed_tokens.weight")  # [V, H]
        output: nn.Module = loaded.get_output_embeddings()
        self.output: Tensor = output.get_parameter("weight")  # [V, H]

    @torch.no_grad()
    def features(self, token_ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, H]: the last layer's, normed, as the output matrix gets them."""
        found: Tensor = self._trunk(input_ids=token_ids, use_cache=False).last_hidden_state
        return found

    def logits(self, features: Tensor) -> Tensor:
        """[..., H] -> [..., V]"""
        return linear(features, self.output)
