"""From a checkpoint's named tensors to the fused weights of the dense decoder."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from penstock.core.checkpoint.model_config import ModelConfig
from penstock.core.checkpoint.tensors import expected_tensors
from penstock.gpu_worker.models.dense import DenseLayer, StoredWeights
from penstock.gpu_worker.models.linear import Linear

Read = Callable[[str], Tensor]
"""Gives the tensor of a name, in any dtype, on any device."""


def build_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, read: Read, *, are_packed: bool = False
) -> StoredWeights:
    """Read every expected tensor once, and fuse what is computed together.

    If the weights of products `are_packed` by the caller, who then keeps none of them, they are not copied where they
    are right as they were read, which may be the file's own memory.
    """
    expected = expected_tensors(config)

    def tensor(*names: str) -> Tensor:
        """The named tensors one below the other, each copied straight to its place."""
        rows = [expected[name][0] for name in names]
        fused = torch.empty((sum(rows), *expected[names[0]][1:]), dtype=dtype, device=device)
        for part, name in zip(torch.split(fused, rows), names, strict=True):
            part.copy_(read(name))
        return fused

    def matrix(*names: str) -> Tensor:
        return read(names[0]).to(device, dtype) if are_packed and len(names) == 1 else tensor(*names)

    def linear(*names: str) -> Linear:
        weight = matrix(*(f"{name}.weight" for name in names))
        has_bias = f"{names[0]}.bias" in expected
        return Linear(weight, tensor(*(f"{name}.bias" for name in names)) if has_bias else None)

    def layers() -> Iterator[DenseLayer]:
        for i in range(config.num_layers):
            layer = f"model.layers.{i}"
            attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
            yield DenseLayer(
                input_norm=tensor(f"{layer}.input_layernorm.weight"),
                qkv=linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
                q_norm=tensor(f"{attention}.q_norm.weight") if config.qk_norm else None,
                k_norm=tensor(f"{attention}.k_norm.weight") if config.qk_norm else None,
                o=linear(f"{attention}.o_proj"),
                mlp_norm=tensor(f"{layer}.post_attention_layernorm.weight"),
                gate_up=linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                down=linear(f"{mlp}.down_proj"),
            )

    embedding = (matrix if config.tied_embeddings else tensor)("model.embed_tokens.weight")
    final_norm = tensor("model.norm.weight")
    lm_head = Linear(embedding) if config.tied_embeddings else linear("lm_head")
    return StoredWeights(embedding, layers(), final_norm, lm_head)
