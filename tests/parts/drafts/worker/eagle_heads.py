"""Heads written as they are published, and what they guess, computed in plain torch from their layout's description."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

HEAD_DIM = 16
_STD = 0.12


def write_head(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """A checkpoint of these."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def llama_config(model: transformers.PreTrainedModel, **changes: Any) -> dict[str, Any]:
    """A head's config.json, as SafeAILab's: that of a Llama with one layer."""
    its = model.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": its.vocab_size,
        "hidden_size": its.hidden_size,
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": its.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
    } | changes


def layer_tensors(prefix: str, hidden: int, inner: int, num_inputs: int, seed: int = 0) -> dict[str, Tensor]:
    """A random Llama layer of 4 heads, 2 of keys and values, without the norm before its attention."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * _STD

    return {
        f"{prefix}self_attn.q_proj.weight": matrix(4 * HEAD_DIM, num_inputs),
        f"{prefix}self_attn.k_proj.weight": matrix(2 * HEAD_DIM, num_inputs),
        f"{prefix}self_attn.v_proj.weight": matrix(2 * HEAD_DIM, num_inputs),
        f"{prefix}self_attn.o_proj.weight": matrix(hidden, 4 * HEAD_DIM),
        f"{prefix}mlp.gate_proj.weight": matrix(inner, hidden),
        f"{prefix}mlp.up_proj.weight": matrix(inner, hidden),
        f"{prefix}mlp.down_proj.weight": matrix(hidden, inner),
        f"{prefix}post_attention_layernorm.weight": 1 + matrix(hidden),
    }


def write_eagle(
    folder: Path,
    model: transformers.PreTrainedModel,
    *,
    has_bias: bool = False,
    named: Tensor | None = None,
    **changes: Any,
) -> None:
    """A random EAGLE head of this model; `named`: the tokens that it guesses, ascending."""
    hidden = model.config.hidden_size
    tensors = layer_tensors("layers.0.", hidden, 80, hidden)
    generator = torch.Generator().manual_seed(9)
    tensors["fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * _STD
    if has_bias:
        tensors["fc.bias"] = torch.randn(hidden, generator=generator)
    if named is not None:
        tensors["d2t"] = named - torch.arange(len(named))
    tensors["embed_tokens.weight"] = model.state_dict()["model.embed_tokens.weight"].clone()
    write_head(folder, tensors, llama_config(model, **changes))


def count_up(model: transformers.PreTrainedModel) -> None:
    """Let the token after t be t + 1, and the one after the last be 0. After `forget_context`."""
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, 0))


def write_right_eagle(folder: Path, model: transformers.PreTrainedModel) -> None:
    """A head that guesses what `forget_context` has made of its model: it hands on the embedding."""
    hidden = model.config.hidden_size
    tensors = layer_tensors("layers.0.", hidden, 80, hidden)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"].zero_()
    tensors["fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    write_head(folder, tensors, llama_config(model))


def forget_context(model: transformers.PreTrainedModel) -> None:
    """Let a Llama's next token depend on its last one alone, whose embedding has unit root mean square."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        table = model.model.embed_tokens.weight
        table.copy_(functional.rms_norm(table, table.shape[-1:]))


def llama_layer(x: Tensor, residual: Tensor, weights: dict[str, Tensor], prefix: str) -> Tensor:
    """A Llama layer over all positions, [T, H]; `x` is what its attention gets."""
    size = x.shape[0]
    q, k, v = (
        functional.linear(x, weights[f"{prefix}self_attn.{name}_proj.weight"]).view(size, -1, HEAD_DIM)
        for name in "qkv"
    )
    angles = torch.arange(size)[:, None] * 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    q, k = (_rotated(each, angles) for each in (q, k))
    k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
    scores += torch.full((size, size), float("-inf")).triu(1)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    x = residual + functional.linear(mixed, weights[f"{prefix}self_attn.o_proj.weight"])
    normed = functional.rms_norm(x, x.shape[-1:], weights[f"{prefix}post_attention_layernorm.weight"], 1e-6)
    gate, up = (functional.linear(normed, weights[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return x + functional.linear(functional.silu(gate) * up, weights[f"{prefix}mlp.down_proj.weight"])


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@torch.inference_mode()
def eagle_guesses(
    model: transformers.PreTrainedModel, head: dict[str, Tensor], text: list[int], count: int
) -> list[int]:
    """What an EAGLE head guesses greedily after a text of which the model knows all but the last token."""
    table, output = (model.state_dict()[f"{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
    given = model.model(torch.tensor([text[:-1]])).last_hidden_state[0]
    tokens = list(text)
    for _ in range(count):
        pair = torch.cat((table[torch.tensor(tokens[1:])], given), dim=1)
        x = functional.linear(pair, head["fc.weight"], head.get("fc.bias"))
        made = llama_layer(x, x, head, "layers.0.")
        logits = output @ made[-1]
        if "d2t" in head:
            named = head["d2t"] + torch.arange(len(head["d2t"]))
            tokens.append(int(named[logits[named].argmax()]))
        else:
            tokens.append(int(logits.argmax()))
        given = torch.cat((given, made[-1:]))
    return tokens[len(text) :]


def write_eagle3(
    folder: Path, model: transformers.PreTrainedModel, named: Tensor, *, prefix: str = "midlayer.", **changes: Any
) -> dict[str, Tensor]:
    """A random EAGLE-3 head with outputs for these tokens, ascending; returns its tensors, the layer's as layers.0."""
    hidden, vocab_size = model.config.hidden_size, model.config.vocab_size
    generator = torch.Generator().manual_seed(5)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * _STD

    tensors = layer_tensors(prefix, hidden, 80, 2 * hidden)
    tensors |= {f"{prefix}{name}.weight": 1 + matrix(hidden) for name in ("input_layernorm", "hidden_norm")}
    tensors |= {"fc.weight": matrix(hidden, 3 * hidden), "norm.weight": 1 + matrix(hidden)}
    tensors |= {"lm_head.weight": matrix(len(named), hidden), "d2t": named - torch.arange(len(named))}
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, named, True)
    config = llama_config(model, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=len(named))
    write_head(folder, tensors, config | changes)
    return {name.replace(prefix, "layers.0."): tensor for name, tensor in tensors.items()}


@torch.inference_mode()
def eagle3_guesses(
    model: transformers.PreTrainedModel,
    head: dict[str, Tensor],
    taps: tuple[int, ...],
    text: list[int],
    count: int,
    *,
    norm_before_residual: bool = False,
) -> list[int]:
    """As `eagle_guesses`."""
    table = head.get("embed_tokens.weight", model.state_dict()["model.embed_tokens.weight"])
    of_layers = model.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    given = functional.linear(torch.cat([of_layers[layer][0] for layer in taps], dim=1), head["fc.weight"])
    tokens = list(text)

    def normed(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], head[f"{name}.weight"], 1e-6)

    for _ in range(count):
        fed = normed(given, "layers.0.hidden_norm")
        pair = torch.cat((normed(table[torch.tensor(tokens[1:])], "layers.0.input_layernorm"), fed), dim=1)
        made = llama_layer(pair, fed if norm_before_residual else given, head, "layers.0.")
        best = int((head["lm_head.weight"] @ normed(made[-1], "norm")).argmax())
        tokens.append(best + int(head["d2t"][best]))
        given = torch.cat((given, made[-1:]))
    return tokens[len(text) :]
