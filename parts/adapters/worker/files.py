"""Reads an adapter: PEFT's folder, adapter_config.json with two matrices for each module, or llama.cpp's GGUF file.

What would be served differently from what was trained is refused by name: other methods than LoRA, biases, embeddings
and modules that were trained whole, weights that are not in the model.

All bytes are read at once, into memory of our own, and are those of the adapter's key: whoever trains may write to the
files meanwhile, or may have since they were loaded.
"""

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from penstock.config.options import ConfigError
from penstock.gpu_worker.formats.gguf_blocks import quantized_weight
from penstock.gpu_worker.models.adapters import Factors, SitePart
from penstock.gpu_worker.models.loading.stored import as_tensor
from penstock.kernels.quantized.weight import dequantized
from penstock.models.description.decoder import Decoder
from penstock.models.description.model_config import ModelConfig
from penstock.models.families.registry import expected_tensors
from penstock.models.files.source import StoredTensor
from penstock.models.gguf.adapter import adapter_file
from penstock.models.gguf.block_types import BLOCK_TYPES
from penstock.models.gguf.container import container_of
from penstock.models.shards.shard import whole_of
from penstock.models.shards.sources import own_tensors
from penstock.parts.adapters.keys import Version, files_of, is_one_file, version_of

_MAX_CONFIG = 1 << 20
_FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
_PREFIXES = ("base_model", "model", "backbone", "language_model", "transformer", "text_model")
"""Names of what is around a decoder: a model that also sees has more of them than the text model it was made from."""
_CHANGES_WEIGHTS = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Beginnings of PEFT's ways to begin a training that take something out of the model's own weights."""


class AdapterError(Exception):
    """The adapter cannot be used; the message says why in one sentence."""


class _Config(Struct):
    """adapter_config.json."""

    peft_type: str = ""
    r: int = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    use_dora: bool = False
    use_qalora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    modules_to_save: list[str] | None = None
    trainable_token_indices: Any = None
    target_parameters: list[str] | None = None
    layer_replication: Any = None
    alora_invocation_tokens: Any = None
    kasa_config: Any = None
    use_bdlora: Any = None
    arrow_config: Any = None
    monteclora_config: Any = None
    init_lora_weights: bool | str | None = True


class Adapter(Struct, frozen=True):
    """The matrices of an adapter, by the names of the model's modules."""

    factors: dict[str, Factors]
    rank: int  # the largest


class Fitting(NamedTuple):
    """What an adapter must fit."""

    modules: Mapping[str, SitePart]  # those that something can be added to
    elsewhere: Collection[str]  # modules of other stages of the pipeline, which look at these
    model: ModelConfig
    max_rank: int  # of any module

    @classmethod
    def of(cls, modules: Mapping[str, SitePart], model: ModelConfig, max_rank: int) -> "Fitting":
        """`model`: what this rank has of it."""
        if not isinstance(model, Decoder) or model.shard is None or model.shard.place.num_stages == 1:
            return cls(modules, (), model, max_rank)
        others = (expected_tensors(whole_of(model)) or {}).keys() - own_tensors(model).keys()
        return cls(modules, {_tail(name.removesuffix(".weight")) for name in others}, model, max_rank)


def read_adapter(path: Path, key: str, fitting: Fitting, dtype: torch.dtype) -> Adapter:
    """Read an adapter of a model.

    Args:
        path: of the folder or file.
        key: its name, and the version of its files.
        fitting: the model's side.
        dtype: of the matrices that are returned.

    Raises:
        AdapterError: it is damaged, belongs to another model, or needs what cannot be done here.
    """
    contents = _contents(path, key)
    found = _of_gguf(path, contents[0], fitting.model) if is_one_file(path) else _of_peft(*contents)
    modules = fitting.modules
    known = _by_tail(modules)
    factors: dict[str, Factors] = {}
    rank = 0
    for name, (a, b, scale) in found.items():
        module = known.get(_tail(name))
        if module is None and _tail(name) in fitting.elsewhere:
            continue
        if module is None:
            raise AdapterError(f"it changes {name!r}, which is not a matrix of this model that adapters can change")
        its = modules[module]
        if (b.shape[0], a.shape[1]) != (its.num_outputs, its.num_inputs):
            raise AdapterError(
                f"it belongs to another model: {name!r} has {b.shape[0]} outputs and {a.shape[1]} inputs, "
                f"here they are {its.num_outputs} and {its.num_inputs}"
            )
        made = Factors(a.to(dtype), (b.float() * scale).to(dtype))
        if not all(matrix.isfinite().all() for matrix in made):
            raise AdapterError(f"the matrices of {name!r} have numbers that are not finite")
        if a.shape[0] > fitting.max_rank:
            raise AdapterError(f"the rank of {name!r} is {a.shape[0]}, more than --max-lora-rank {fitting.max_rank}")
        rank = max(rank, a.shape[0])
        factors[module] = made
    if not found:
        raise AdapterError("it has no matrices")
    return Adapter(factors, rank)


_Scaled = tuple[Tensor, Tensor, float]
"""A and B of a module, which fit each other, and by what their product is multiplied."""


def _contents(path: Path, key: str) -> list[bytes]:
    """The adapter's files, if they still are those that were loaded."""
    contents, version = [], Version()
    for file in files_of(path):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise AdapterError(f"cannot read {str(file)!r}: {error.strerror}") from None
        version.note(file.name, len(content), (content,))
        contents.append(content)
    if str(version) != version_of(key):
        raise AdapterError("its files have changed since it was loaded: load it again")
    return contents


def _of_peft(config_file: bytes, weights: bytes) -> dict[str, _Scaled]:
    config = _config(config_file)
    return {name: (a, b, _scale(config, name, _rank(name, a, b))) for name, (a, b) in _matrices(weights).items()}


def _of_gguf(path: Path, content: bytes, model: ModelConfig) -> dict[str, _Scaled]:
    whole = whole_of(model)
    if not isinstance(whole, Decoder):
        raise AdapterError(f"adapters of {whole.architecture} are read as PEFT stores them, not from a GGUF file")
    try:
        file = adapter_file(container_of(path, memoryview(bytearray(content))), whole)
    except ConfigError as error:
        raise AdapterError(str(error)) from None
    found = {}
    for name, its in file.matrices.items():
        a, b = map(_numbers, its)
        found[name.removesuffix(".weight")] = a, b, file.alpha / _rank(name, a, b) if file.alpha else 1.0
    return found


def _rank(name: str, a: Tensor, b: Tensor) -> int:
    """Check that two matrices can be multiplied."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not a.numel() or not b.numel():
        raise AdapterError(f"the matrices of {name!r} have shapes {list(a.shape)} and {list(b.shape)}")
    return a.shape[0]


def _numbers(stored: StoredTensor) -> Tensor:
    if not stored.num_elements:
        return torch.zeros(stored.shape)
    read = as_tensor(stored)
    return dequantized(quantized_weight(stored.dtype, read)) if stored.dtype in BLOCK_TYPES else read


def _config(content: bytes) -> _Config:
    if len(content) > _MAX_CONFIG:
        raise AdapterError(f"adapter_config.json has {len(content)} bytes; at most {_MAX_CONFIG} are read")
    try:
        config = msgspec.json.decode(content, type=_Config)
    except msgspec.MsgspecError as error:
        raise AdapterError(f"adapter_config.json cannot be understood: {error}") from None
    if config.peft_type != "LORA":
        raise AdapterError(f"its peft_type is {config.peft_type[:64]!r}; LORA is served")
    unserved = {
        "use_dora": config.use_dora,
        "use_qalora": config.use_qalora,
        "lora_bias": config.lora_bias,
        f"bias {config.bias[:16]!r}": config.bias != "none",
        "modules_to_save": config.modules_to_save,
        "trainable_token_indices": config.trainable_token_indices,
        "target_parameters": config.target_parameters,
        "layer_replication": config.layer_replication,
        "alora_invocation_tokens": config.alora_invocation_tokens,
        "kasa_config": config.kasa_config,
        "use_bdlora": config.use_bdlora,
        "arrow_config": config.arrow_config,
        "monteclora_config": config.monteclora_config,
    }
    if wanted := [_shown(name, value) for name, value in unserved.items() if value]:
        raise AdapterError(f"it was trained with {', '.join(wanted)}, which is not supported")
    began = config.init_lora_weights
    if isinstance(began, str) and began.lower().startswith(_CHANGES_WEIGHTS):
        raise AdapterError(
            f"its init_lora_weights is {began[:64]!r}, so it fits a model whose own weights were changed, too: save it "
            "with PEFT's path_initial_model_for_weight_conversion"
        )
    return config


def _shown(option: str, value: Any) -> str:
    """An option, and the modules that it names."""
    if not isinstance(value, list | dict) or not all(isinstance(name, str) for name in value):
        return option
    names = [repr(name[:64]) for name in value]
    return f"{option} ({', '.join(names[:4])}{', …' * (len(names) > 4)})"


def _matrices(content: bytes) -> dict[str, tuple[Tensor, Tensor]]:
    """The two matrices of each module, by its name in PEFT."""
    try:
        tensors = load(content)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:  # of the header, a dtype, or a size
        raise AdapterError(f"adapter_model.safetensors is damaged: {error}") from None
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name)
        if match is None:
            raise AdapterError(f"its weight {name[:128]!r} is not supported: only those of linear layers are")
        halves.setdefault(match["module"], {})[match["which"]] = tensor
    lonely = next((name for name, its in halves.items() if its.keys() != {"A", "B"}), None)
    if lonely is not None:
        raise AdapterError(f"one of the two matrices of {lonely!r} is missing")
    return {name: (its["A"], its["B"]) for name, its in halves.items()}


def _scale(config: _Config, module: str, rank: int) -> float:
    alpha = config.lora_alpha
    for pattern, its in (config.alpha_pattern or {}).items():
        try:
            matches = re.fullmatch(rf"(.*\.)?({pattern})", module)
        except re.error as error:
            raise AdapterError(f"alpha_pattern {pattern[:64]!r} is no regular expression: {error}") from None
        if matches:
            alpha = its
            break
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)


def _tail(name: str) -> str:
    """A module's name without what stands around the decoder."""
    parts = name.split(".")
    while parts and parts[0] in _PREFIXES:
        del parts[0]
    return ".".join(parts)


def _by_tail(modules: Mapping[str, SitePart]) -> dict[str, str]:
    return {_tail(module): module for module in modules}
