"""Checks in milliseconds, before any process starts, whether a checkpoint can be served."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.config.groups.parallel import ParallelOptions
from penstock.config.options import ConfigError, KVCacheDType, ModelImpl
from penstock.models.described import model_config_of, own_names_of
from penstock.models.description.decoder import Decoder
from penstock.models.description.model_config import ModelConfig
from penstock.models.families.registry import expected_matrices, expected_tensors, is_ignored
from penstock.models.files.source import Checkpoint, LoadError, StoredTensor, eos_token_ids
from penstock.models.formats.format import FLOATS, MatrixFormat, Part, Shape
from penstock.models.kv_formats import kv_format_of
from penstock.models.parsing.json_fields import shown
from penstock.models.shards.experts import with_experts_spread
from penstock.models.shards.shard import check_shards
from penstock.models.shards.stages import stage_ranges

_FLOATS = (*FLOATS, "F8_E4M3", "F8_E5M2")
_OF_QUANTIZED = (".qweight", ".qzeros", ".scales", ".g_idx", ".SCB", ".absmax", ".weight_scale", ".weight_scale_inv")
"""Name endings of the additional tensors in quantized formats."""


def check_checkpoint(
    checkpoint: Checkpoint,
    impl: ModelImpl = "auto",
    quantization: str = "",
    kv_cache_dtype: KVCacheDType = "auto",
    parallel: ParallelOptions | None = None,
    *,
    with_weights: bool = True,
    with_tokenizer: bool = True,
) -> None:
    """Check everything that can be checked without reading a tensor. `quantization`: the option's value.

    With `parallel`, also check that the model can be split over that many workers.

    Raises:
        ConfigError: one clear sentence: what is not supported, missing or damaged, and what to do.
    """
    config = model_config_of(checkpoint, impl, quantization, with_weights=with_weights)
    kv_format_of(kv_cache_dtype, config)
    if parallel is not None:
        config = with_experts_spread(config, parallel)
        check_shards(config, parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        if isinstance(config, Decoder):
            stage_ranges(config, parallel.pipeline_parallel_size, parallel.pipeline_layers)
    eos_token_ids(checkpoint)
    if with_tokenizer:
        _check_tokenizer(checkpoint, config.vocab_size)
    if with_weights and expected_tensors(config) != {}:
        model_tensors(checkpoint, config)


def model_tensors(checkpoint: Checkpoint, config: ModelConfig) -> "ModelTensors":
    """Return all tensors of the checkpoint, checked against those that `config` expects (if it lists them).

    Raises:
        LoadError: if tensors are missing, damaged, unexpected, of other shapes or dtypes.
    """
    stored = checkpoint.tensors()
    own_names = own_names_of(stored, config)
    found = {known: stored[name] for known, name in own_names.items()}
    shapes = expected_tensors(config)
    if shapes is None:
        _explain(found)
        return ModelTensors(found, {}, own_names)
    parts, formats = _expected_parts(config, shapes, found, own_names)
    for name, part in parts.items():
        other = next((its for its in part.other_names if its in found), None)
        if name not in found and other is not None:
            found[name] = found.pop(other)
    missing = [name for name, part in parts.items() if name not in found and not part.is_optional]
    unexpected = [name for name in found if name not in parts and not _is_ignored(name, config)]
    if (missing or unexpected) and config.quantization is None:
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
    for name, part in parts.items():
        its = found.get(name)
        if its is None:
            continue
        if part.shape is not None and not _is_shape(its.shape, part):
            raise LoadError(f"tensor {name} has shape {list(its.shape)}, but config.json asks for {list(part.shape)}")
        if its.dtype not in part.dtypes:
            wanted = "floats" if part.dtypes is _FLOATS else " or ".join(part.dtypes)
            raise LoadError(f"tensor {name} is of type {its.dtype}, but config.json asks for {wanted}")
    return ModelTensors(found, formats, own_names)


class ModelTensors(NamedTuple):
    """The tensors that a checkpoint has of a model."""

    stored: dict[str, StoredTensor]  # by the model's names
    formats: dict[str, MatrixFormat]  # of each quantized matrix, by its weight's name
    own_names: dict[str, str]  # the checkpoint's own name of each tensor


def _expected_parts(
    config: ModelConfig, shapes: dict[str, Shape], found: Mapping[str, StoredTensor], own_names: Mapping[str, str]
) -> tuple[dict[str, Part], dict[str, MatrixFormat]]:
    """Return every tensor that must exist, and the format of each quantized matrix."""
    parts: dict[str, Part] = {}
    formats: dict[str, MatrixFormat] = {}
    quantization = config.quantization
    matrices = expected_matrices(config) if quantization is not None else {}
    own_stems = {} if quantization is None else {_stem(known): _stem(own) for known, own in own_names.items()}
    for name, shape in shapes.items():
        its = found.get(name)
        is_plain = quantization is None or name not in matrices or (its is not None and its.dtype in FLOATS)
        own_name = own_stems.get(_stem(name), _stem(name)) + name.removeprefix(_stem(name))
        format = None if is_plain or quantization is None else quantization.format_of(own_name)
        if format is None:
            parts[name] = Part(name, shape, _FLOATS)
        else:
            formats[name] = format
            parts.update((part.name, part) for part in format.parts(name, matrices[name]).values())
    return parts, formats


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _is_ignored(name: str, config: ModelConfig) -> bool:
    quantization = config.quantization
    return is_ignored(name, config) or (quantization is not None and quantization.ignores(name))


def _is_shape(shape: Shape, part: Part) -> bool:
    """Compare shapes. Axes of size 1 matter only in tensors of floats, where they distinguish models."""
    if shape == part.shape or part.shape is None or part.dtypes is _FLOATS:
        return shape == part.shape
    return [size for size in shape if size != 1] == [size for size in part.shape if size != 1]


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _AddedToken(msgspec.Struct):
    id: int


class _Tokenizer(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def _check_tokenizer(checkpoint: Checkpoint, vocab_size: int) -> None:
    """Added tokens may exceed the model's vocabulary: many fine-tuned models have an unused one for padding."""
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
    """Raise an error that says what the checkpoint is, if its tensors show it."""
    if found := next((name for name in names if name.endswith(_OF_QUANTIZED)), None):
        raise LoadError(
            f"this checkpoint is quantized, as {shown(found)} shows, but its config.json does not say how "
            "(quantization_config): download it again"
        )
    if any(name.startswith(("language_model.", "model.language_model.", "vision_tower.", "visual.")) for name in names):
        raise LoadError(
            "these are the weights of a model that takes images or sound (language_model., vision_tower., ...); "
            "only text models are served"
        )
    if any(".lora_A." in name or ".lora_B." in name for name in names):
        raise LoadError(
            "these are the weights of a LoRA adapter, which is served beside its model: penstock serve MODEL --lora "
            "NAME=PATH"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
