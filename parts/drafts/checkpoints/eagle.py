"""EAGLE heads (Li et al., 2024) as SafeAILab publishes them, and as the library `speculators` writes them.

A head is one or a few decoder layers over fc([embedding of the next token; the model's last hidden state, normed]). The
first layer has no norm before its attention. Embedding and output matrix are the model's. With a token map, the head
computes the outputs of frequent tokens only (Zhao et al., "FR-Spec", 2025): as in EAGLE-3, output i means token
i + d2t[i].
"""

import math
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Decoder, Entry, Norm
from penstock.models.description.names import Names
from penstock.models.families.registry import parse_model_config
from penstock.models.files.source import StoredTensor
from penstock.parts.drafts.checkpoints.head import TOKEN_OFFSETS, DraftHead

LAYERS_OF = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose layers heads may use."""
IGNORED = ("embed_tokens.", "lm_head.", "rotary_emb.", "layers.0.self_attn.rotary_emb.")
"""Beginnings of the names of tensors that the model has, too, or that follow from the configuration."""

_NAMES = Names(layer="layers.{}.", embedding="embed_tokens")


def known_as(name: str) -> str:
    """Return the layout's name of a stored tensor."""
    name = name.removeprefix("model.")
    for other, usual in (("fusion_fc.", "fc."), ("transformer.", "layers.0.")):
        if name.startswith(other):
            return usual + name.removeprefix(other)
    return name


def parse_eagle(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], model: Decoder) -> DraftHead:
    """Read a head's configuration.

    Args:
        config: its config.json.
        tensors: by the layout's names.
        model: the one whose hidden states the head gets.

    Raises:
        ConfigError: it is not an EAGLE head, or belongs to another model.
    """
    if config.get("speculators_model_type") not in (None, "eagle") or config.get("layernorms"):
        raise ConfigError("it is of another kind than eagle, or has norms that eagle has not")
    decoder = layers_of(config)
    check_sizes(decoder, model)
    norm = Norm(eps=model.final_norm.eps if model.final_norm else 1e-6)
    has_norms = bool(config.get("add_para_norm"))
    entry = Entry(
        embedding_norm=norm if has_norms else None,
        given_norm=norm if has_norms else None,
        has_bias="fc.bias" in tensors,
    )
    names = replace(_NAMES, entry_embedding_norm="embedding_layernorm", entry_given_norm="hidden_states_layernorm")
    offsets = tensors.get(TOKEN_OFFSETS)
    return DraftHead(
        decoder=from_entry(decoder, entry, names),
        has_token_map=offsets is not None,
        num_picked=None if offsets is None else math.prod(offsets.shape),
    )


def from_entry(decoder: Decoder, entry: Entry, names: Names, *, has_embedding: bool = False) -> Decoder:
    """Turn a model's layers into a head's: the input is an entry, and the output is the last hidden state."""
    first, *others = decoder.layers
    return replace(
        decoder,
        layers=(replace(first, mixer_norm=None), *others),
        final_norm=None,
        has_embedding=has_embedding,
        has_head=False,
        tied_embeddings=False,
        entry=entry,
        names=names,
    )


def layers_of(config: Mapping[str, Any]) -> Decoder:
    """Return the layers that a head's configuration describes, as a model."""
    inner = config.get("transformer_layer_config") or config.get("model")
    fields = {**config, **inner} if isinstance(inner, dict) else dict(config)
    names = [name for name in fields.get("architectures") or () if isinstance(name, str)]
    usual = (name.replace("Eagle3", "").replace("Eagle", "") for name in names)
    architecture = next((name for name in usual if name in LAYERS_OF), None)
    if architecture is None and isinstance(inner, dict):
        kind = str(inner.get("model_type") or "llama")
        architecture = next((name for name in LAYERS_OF if name.lower() == f"{kind.lower()}forcausallm"), None)
    if architecture is None:
        shown = ", ".join(name[:64] for name in names) or "none"
        raise ConfigError(
            f"its config.json names the architecture {shown}; heads with layers of these are supported: "
            + ", ".join(LAYERS_OF)
        )
    fields.pop("auto_map", None)
    decoder = parse_model_config({**fields, "architectures": [architecture]})
    if not isinstance(decoder, Decoder) or decoder.quantization is not None:
        raise ConfigError("its weights are quantized; heads are read in float32, bfloat16 or float16")
    if any(window is not None for window in decoder.windows):
        raise ConfigError("its config.json asks for attention windows, which heads cannot have")
    return decoder


def check_sizes(head: Decoder, model: Decoder) -> None:
    """Refuse a head whose sizes are those of another model."""
    for what, its, wanted in (
        ("a hidden size", head.hidden_size, model.hidden_size),
        ("a vocabulary", head.vocab_size, model.vocab_size),
    ):
        if its != wanted:
            raise ConfigError(f"it is a head for a model with {what} of {its}; this model's is {wanted}")
