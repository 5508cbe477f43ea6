"""EAGLE-3 heads (Li et al., 2025) as SafeAILab, SpecForge and the library `speculators` write them.

A head gets the inputs of three layers of the model, projected by `fc`. It has its own output matrix, often for some
tokens only: output i means token i + d2t[i]. The attention of its first layer gets [input_layernorm(embedding of the
next token), hidden_norm(projected inputs)].
"""

from collections.abc import Mapping
from typing import Any

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Decoder, Entry
from penstock.models.description.names import Names
from penstock.models.files.source import StoredTensor
from penstock.models.parsing.json_fields import JsonFields
from penstock.parts.drafts.checkpoints.eagle import from_entry, layers_of
from penstock.parts.drafts.checkpoints.head import TOKEN_OFFSETS, DraftHead

IGNORED = ("t2d", "rotary_emb.", "layers.0.self_attn.rotary_emb.")
"""Beginnings of the names of tensors that follow from others."""

_NAMES = Names(
    layer="layers.{}.",
    embedding="embed_tokens",
    entry_embedding_norm="layers.0.input_layernorm",
    entry_given_norm="layers.0.hidden_norm",
)


def known_as(name: str) -> str:
    """Return the layout's name of a stored tensor."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


def parse_eagle3(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], model: Decoder) -> DraftHead:
    """Read a head's configuration; arguments as in `parse_eagle`.

    Raises:
        ConfigError: it is not an EAGLE-3 head, or belongs to another model.
    """
    if config.get("speculators_model_type") not in (None, "eagle3"):
        raise ConfigError("it is of another kind than eagle3")
    decoder, fields = layers_of(config), JsonFields("config.json", config)
    if decoder.vocab_size != model.vocab_size:
        raise ConfigError(
            f"it is a head for a model with a vocabulary of {decoder.vocab_size}; this model's is {model.vocab_size}"
        )
    given_size = fields.whole("target_hidden_size", model.hidden_size)
    has_own = "embed_tokens.weight" in tensors
    if given_size != model.hidden_size or (not has_own and decoder.hidden_size != model.hidden_size):
        its = given_size if given_size != model.hidden_size else decoder.hidden_size
        raise ConfigError(f"it is a head for a model with a hidden size of {its}; this model's is {model.hidden_size}")
    if "lm_head.weight" not in tensors and decoder.hidden_size != model.hidden_size:
        raise ConfigError("it lacks lm_head.weight, and has another hidden size than this model")
    norm = decoder.layers[0].mixer_norm
    entry = Entry(embedding_norm=norm, given_norm=norm, projects=False, is_residual=fields.flag("norm_before_residual"))
    return DraftHead(
        decoder=from_entry(decoder, entry, _NAMES, has_embedding=has_own),
        norm=norm,
        num_outputs=fields.whole("draft_vocab_size", model.vocab_size) if "lm_head.weight" in tensors else None,
        has_token_map=TOKEN_OFFSETS in tensors,
        taps=_taps(config, len(model.layers)),
        given_size=given_size,
    )


def _taps(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs the head gets; by default near the beginning, the middle and the end."""
    inner = config.get("eagle_config")
    said = {**config, **inner} if isinstance(inner, dict) else config
    if said.get("use_aux_hidden_state") is False:
        return ()
    found = said.get("eagle_aux_hidden_state_layer_ids") or [2, num_layers // 2, num_layers - 3]
    if not isinstance(found, list) or not all(type(layer) is int and 0 <= layer <= num_layers for layer in found):
        raise ConfigError(f"it listens to layers {str(found)[:64]}, but this model has {num_layers}")
    return tuple(found)
