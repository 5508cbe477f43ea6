"""From a checkpoint's named tensors to the fused weights of the dense decoder."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from penstock.gpu_worker.layers import Linear
from penstock.gpu_worker.model_config import ModelConfig
from penstock.gpu_worker.models.dense import DenseLayer, StoredWeights

Shape = tuple[int, ...]
Read = Callable[[str], Tensor]
"""Gives the tensor of a name, in any dtype, on any device."""


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that the checkpoint must have, with its shape."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

    def linear(name: str, out_size: int, in_size: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out_size, in_size)
        if bias:
            shapes[f"{name}.bias"] = (out_size,)

    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        linear(f"{layer}.self_attn.q_proj", q_size, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv_size, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv_size, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, q_size, config.o_bias)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        linear(f"{layer}.mlp.gate_proj", inner, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.up_proj", inner, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, inner, config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint's tensor is known to carry nothing: a saved rotary buffer, a tied output matrix."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_embeddings)


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
