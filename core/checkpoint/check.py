"""Whether a checkpoint can be served: checked in milliseconds, before any process starts."""

from typing import Any

import msgspec

from penstock.core.checkpoint.families.registry import expected_tensors, family_of, is_ignored, parse_model_config
from penstock.core.checkpoint.model_config import ModelConfig, quantized
from penstock.core.checkpoint.source import Checkpoint, LoadError, StoredTensor, eos_token_ids
from penstock.core.config.options import ConfigError, ModelImpl

_FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
_OF_QUANTIZED = (".qweight", ".qzeros", ".scales", ".g_idx", ".SCB", ".absmax", ".weight_scale", ".weight_scale_inv")
"""Name endings of the additional tensors in quantized formats."""


def check_checkpoint(
    checkpoint: Checkpoint, impl: ModelImpl = "auto", *, with_weights: bool = True, with_tokenizer: bool = True
) -> None:
    """Check everything that can be known without reading a tensor.

    Raises:
        ConfigError: one clear sentence: what is not supported, missing or damaged, and what to do.
    """
    config = parse_model_config(checkpoint.config, impl)
    eos_token_ids(checkpoint)
    if with_tokenizer:
        _check_tokenizer(checkpoint, config.vocab_size)
    if with_weights and expected_tensors(config) != {}:
        model_tensors(checkpoint, config)


def model_tensors(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, StoredTensor]:
    """Return all tensors of the checkpoint, checked against those that `config` expects (if it lists them).

    Raises:
        LoadError: if tensors are missing, damaged, unexpected, quantized or of other shapes.
    """
    known_as = family_of(config).known_as
    found = {known_as(name): stored for name, stored in checkpoint.tensors().items()}
    expected = expected_tensors(config)
    if expected is None:
        _explain(found)
        return found
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected and not is_ignored(name, config)]
    if missing or unexpected:
        _explain(found)
    if missing:
        raise LoadError(
            f"the checkpoint lacks {_some(missing)}, which {config.architecture} has by its config.json: "
            "the weights are not complete, or of another model"
        )
    if unexpected:
        raise LoadError(
            f"the checkpoint has tensors that {config.architecture} does not have by its config.json: "
            f"{_some(unexpected)}; the weights are of another model"
        )
    for name, shape in expected.items():
        stored = found[name]
        if stored.shape != shape:
            raise LoadError(f"tensor {name} has shape {list(stored.shape)}, but config.json asks for {list(shape)}")
        if stored.dtype not in _FLOATS:
            raise LoadError(str(quantized(f"tensor {name} is of type {stored.dtype}")))
    return found


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _AddedToken(msgspec.Struct):
    id: int


class _Tokenizer(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def _check_tokenizer(checkpoint: Checkpoint, vocab_size: int) -> None:
    """Added tokens may go beyond the model's vocabulary: many fine-tuned models have one for padding, never used."""
    try:
        tokenizer = msgspec.json.decode(checkpoint.tokenizer(), type=_Tokenizer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"the tokenizer.json of {str(checkpoint.path)!r} is no tokenizer ({error}); download it again"
        ) from None
    vocab = tokenizer.model.vocab
    last = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
    added = {token.id for token in tokenizer.added_tokens}
    while last in added:
        last -= 1
    if last >= vocab_size:
        raise ConfigError(
            f"the tokenizer.json of {str(checkpoint.path)!r} has {last + 1} tokens, but vocab_size in its "
            f"config.json is {vocab_size}: take both from the same model"
        )


def _explain(names: dict[str, StoredTensor]) -> None:
    """Say what the checkpoint is, if its tensors show it."""
    if found := next((name for name in names if name.endswith(_OF_QUANTIZED)), None):
        raise LoadError(str(quantized(f"it has {found}")))
    if any(name.startswith(("language_model.", "model.language_model.", "vision_tower.", "visual.")) for name in names):
        raise LoadError(
            "these are the weights of a model that takes images or sound (language_model., vision_tower., ...); "
            "only text models are served"
        )
    if any(".lora_A." in name or ".lora_B." in name for name in names):
        raise LoadError(
            "these are the weights of a LoRA adapter, which is not supported yet: merge it into its model "
            "(PEFT: merge_and_unload) and serve the result"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
