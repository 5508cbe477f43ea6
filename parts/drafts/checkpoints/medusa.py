"""Medusa's heads (Cai et al., 2024): each guesses one token further ahead, from the model's last hidden state alone.

A head is a few residual blocks, x + silu(W x + b), and an output matrix. Two layouts are published: Medusa's own
(`0.0.linear.weight`, ..., `0.1.weight`) and vLLM's (`blocks.0.layers.0.weight`, ..., `lm_heads.0.weight`). The numbers
of heads and blocks are taken from the tensors, because the first published configurations have wrong numbers.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Decoder
from penstock.models.files.source import StoredTensor
from penstock.models.parsing.family import Shape
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.weights.decoder import stored_tensors
from penstock.models.weights.sources import LinearSource, Source

_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
_BLOCK_OF_VLLM = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_MAX_HEADS = 64
TOKEN_MAP = "token_map"
COMMON_OUTPUT = "lm_head"


class MedusaHead(NamedTuple):
    """Where the weights of a head are."""

    blocks: tuple[LinearSource, ...]  # [H, H]
    output: LinearSource | None  # [outputs, H]; None: the model's


class Medusa(NamedTuple):
    """All heads."""

    heads: tuple[MedusaHead, ...]
    token_map: Source | None = None  # int64[outputs]: the token of each; None: all, in order


def known_as(name: str) -> str:
    """Return the name of a stored tensor in vLLM's layout, which numbers outputs separately."""
    for prefix in ("medusa_heads.", "medusa_head."):
        name = name.removeprefix(prefix)
    if found := _BLOCK.fullmatch(name):
        return f"blocks.{found[1]}.layers.{found[2]}.{found[3]}"
    if found := _OUTPUT.fullmatch(name):
        return f"lm_heads.{found[1]}.weight"
    return name


def parse_medusa(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], model: Decoder) -> Medusa:
    """Find the heads.

    Args:
        config: their config.json.
        tensors: by vLLM's names.
        model: the one whose hidden states they get.

    Raises:
        ConfigError: there are none, or they belong to another model.
    """
    fields, hidden = JsonFields("config.json", config), model.hidden_size
    places = [(int(found[1]), int(found[2])) for name in tensors if (found := _BLOCK_OF_VLLM.fullmatch(name))]
    num_heads = 1 + max((head for head, _ in places), default=-1)
    num_blocks = 1 + max((block for _, block in places), default=-1)
    if not 1 <= num_heads <= _MAX_HEADS or num_blocks > _MAX_HEADS:
        raise ConfigError("it has no tensors of Medusa's heads, such as 0.0.linear.weight or blocks.0.layers.0.weight")
    _check_hidden_size(tensors, hidden)
    num_outputs, has_map = model.vocab_size, TOKEN_MAP in tensors
    its_vocab = fields.whole("vocab_size", num_outputs) if "medusa_num_heads" not in config else num_outputs
    if its_vocab != num_outputs:
        raise ConfigError(f"it is for a model with a vocabulary of {its_vocab}; this model's is {num_outputs}")
    if has_map:
        num_outputs = fields.whole("truncated_vocab_size", num_outputs, most=num_outputs)
    is_common = fields.flag("original_lm_head")

    def head(number: int) -> MedusaHead:
        blocks = tuple(_linear(f"blocks.{number}.layers.{i}", hidden, hidden, tensors) for i in range(num_blocks))
        name = f"lm_heads.{number}"
        if is_common or f"{name}.weight" not in tensors:
            name = COMMON_OUTPUT
        if f"{name}.weight" not in tensors and is_common and not has_map:
            return MedusaHead(blocks, None)
        return MedusaHead(blocks, _linear(name, num_outputs, hidden, tensors))

    return Medusa(
        tuple(head(number) for number in range(num_heads)),
        Source((TOKEN_MAP,), ((num_outputs,),)) if has_map else None,
    )


def medusa_shapes(medusa: Medusa) -> dict[str, Shape]:
    """Return every tensor of floats that the checkpoint must have."""
    return stored_tensors(medusa.heads)


def _check_hidden_size(tensors: Mapping[str, StoredTensor], hidden: int) -> None:
    its = {tensors[name].shape[-1] for name in _weights(tensors) if tensors[name].shape}
    if its and hidden not in its:
        raise ConfigError(f"it is for a model with a hidden size of {min(its)}; this model's is {hidden}")


def _weights(tensors: Iterable[str]) -> Iterable[str]:
    return (name for name in tensors if name.startswith("blocks.") and name.endswith(".weight"))


def _linear(name: str, num_outputs: int, num_inputs: int, tensors: Mapping[str, StoredTensor]) -> LinearSource:
    bias = Source((f"{name}.bias",), ((num_outputs,),)) if f"{name}.bias" in tensors else None
    return LinearSource(Source((f"{name}.weight",), ((num_outputs, num_inputs),)), bias)
