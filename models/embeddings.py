"""How a checkpoint makes text embeddings: sentence-transformers' modules, which any model may have."""

from typing import Literal, NamedTuple

from penstock.config.groups.frontend import FrontendOptions
from penstock.config.options import ConfigError
from penstock.models.files.source import Checkpoint
from penstock.models.parsing.json_fields import shown

_MODES: dict[str, Literal["last", "mean"]] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_SERVED = "Transformer, Pooling (of the last token, or the mean of all) and Normalize"


class Embeddings(NamedTuple):
    """How a text becomes a vector."""

    kind: Literal["last", "mean"] = "last"
    is_normalized: bool = True
    hidden_size: int = 0  # size of a full vector; 0: unknown


def embeddings_of(checkpoint: Checkpoint, options: FrontendOptions) -> Embeddings:
    """Return the options' settings, or else the checkpoint's, or else the last token's vector with length 1.

    Raises:
        ConfigError: a module or pooling mode of the checkpoint is not supported, and no option replaces it.
    """
    kind: Literal["last", "mean"] = "last"
    is_normalized = True
    modules = checkpoint.embedding_modules()
    if modules:
        is_normalized = any(name == "Normalize" for name, _ in modules)
        for name, settings in modules:
            if name == "Pooling" and options.pooling == "auto":
                kind = _kind_of({key: value for key, value in settings.items() if value})
            elif name not in ("Transformer", "Pooling", "Normalize") and options.pooling == "auto":
                raise ConfigError(
                    f"modules.json: the module {shown(name)} is not supported, only sentence-transformers' {_SERVED}; "
                    "--pooling last or --pooling mean ignores it"
                )
    if options.pooling != "auto":
        kind = options.pooling
    return Embeddings(kind, is_normalized, _hidden_size(checkpoint))


def _kind_of(settings: dict[str, object]) -> Literal["last", "mean"]:
    asked = [name for name in settings if name.startswith("pooling_mode_")]
    if isinstance(named := settings.get("pooling_mode"), str):  # in newer files
        asked = [f"pooling_mode_{named}"]
        asked = [{"pooling_mode_mean": "pooling_mode_mean_tokens"}.get(name, name) for name in asked]
    if len(asked) == 1 and asked[0] in _MODES:
        return _MODES[asked[0]]
    said = " and ".join(asked) or "no pooling_mode"
    raise ConfigError(
        f"the Pooling module says {shown(said)}; a decoder's vectors are pooled by {' or '.join(_MODES)}: "
        "--pooling last or --pooling mean takes one of these"
    )


def _hidden_size(checkpoint: Checkpoint) -> int:
    config = checkpoint.config
    for fields in (config, config.get("text_config")):
        for name in ("hidden_size", "n_embd", "d_model"):
            found = fields.get(name) if isinstance(fields, dict) else None
            if isinstance(found, int) and found > 0:
                return found
    return 0
