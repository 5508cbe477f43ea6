"""Checks before any process starts whether one checkpoint can guess tokens for another."""

from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from penstock.config.options import Config, ConfigError
from penstock.models.check import check_checkpoint
from penstock.models.described import model_config_of
from penstock.models.description.decoder import Decoder
from penstock.models.description.model_config import ModelConfig
from penstock.models.files.source import Checkpoint
from penstock.models.finding.registry import open_checkpoint, open_model
from penstock.models.kv_formats import kv_format_of
from penstock.parts.drafts.speculative import SpeculativeConfig


def check_draft_model(
    config: Config, speculative: SpeculativeConfig, *, with_weights: bool, with_tokenizer: bool
) -> None:
    """Check the checkpoint that `--speculative-config` names.

    Raises:
        ConfigError: it cannot be served, or cannot guess for this model, with the reason.
    """
    draft, model = open_checkpoint(Path(speculative.model)), open_model(config)
    try:
        check_checkpoint(
            draft,
            quantization=speculative.quantization or "",
            with_weights=with_weights,
            with_tokenizer=with_tokenizer,
        )
        draft_config(config, speculative, draft)
        if with_tokenizer:
            _check_same_tokens(model, draft)
    except ConfigError as error:
        raise ConfigError(f"--speculative-config, the draft model {speculative.model!r}: {error}") from None


def draft_config(config: Config, speculative: SpeculativeConfig, draft: Checkpoint) -> ModelConfig:
    """Return the configuration of the draft model as it is served.

    Raises:
        ConfigError: it cannot be a draft model.
    """
    has_weights = config.worker.load_format != "dummy"
    parsed = model_config_of(draft, quantization=speculative.quantization or "", with_weights=has_weights)
    kv_format_of(config.worker.kv_cache_dtype, parsed)
    shapes = {shape._replace(window=None) for shape in parsed.kv}
    if len(shapes) > 1:
        raise ConfigError(
            f"the layers of {parsed.architecture} keep different numbers of each position; those of a draft model "
            "must keep the same, since its pages are those of the model"
        )
    if isinstance(parsed, Decoder) and parsed.state_layers:
        raise ConfigError(f"{parsed.architecture} keeps a state of each row, which cannot go back behind wrong guesses")
    if (speculative.max_model_len or 0) > parsed.max_model_len:
        raise ConfigError(f"max_model_len {speculative.max_model_len} exceeds its {parsed.max_model_len} positions")
    return parsed


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[list[Any]] = {}


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def _check_same_tokens(model: Checkpoint, draft: Checkpoint) -> None:
    """Raise unless both have the same tokens with the same numbers.

    Unused numbers at the end do not matter: models have them so that matrices have round sizes.
    """
    own, theirs = _tokens(model), _tokens(draft)
    differing = next((i for i in sorted({*own, *theirs}) if own.get(i) != theirs.get(i)), None)
    if differing is not None:
        raise ConfigError(
            f"its vocabulary is not the model's: token {differing} is {_shown(theirs.get(differing))}, but "
            f"{_shown(own.get(differing))} in {str(model.path)!r}; a draft model must have the same tokens"
        )


def _tokens(checkpoint: Checkpoint) -> dict[int, str]:
    """Return the tokens by number. `check_checkpoint` has read them already."""
    tokenizer = msgspec.json.decode(checkpoint.tokenizer(), type=_Tokenizer)
    vocab = tokenizer.model.vocab
    pairs = ((i, token) for token, i in vocab.items()) if isinstance(vocab, dict) else enumerate(t[0] for t in vocab)
    return dict(chain(pairs, ((token.id, token.content) for token in tokenizer.added_tokens)))


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token[:40])
