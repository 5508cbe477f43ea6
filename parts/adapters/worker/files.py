"""Reads an adapter as PEFT stores it: adapter_config.json, and two matrices for each module in safetensors.

What would be served differently from what was trained is refused by name: other methods than LoRA, biases, embeddings
and modules that were trained whole, weights that are not in the model.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.gpu_worker.models.adapters import Factors, SitePart

_MAX_CONFIG = 1 << 20
_FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
_PREFIXES = ("base_model", "model", "language_model", "transformer", "text_model")
"""Names of what is around a decoder: a model that also sees has more of them than the text model it was made from."""


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


class Adapter(Struct, frozen=True):
    """The matrices of an adapter, by the names of the model's modules."""

    factors: dict[str, Factors]
    rank: int  # the largest


def read_adapter(path: Path, modules: Mapping[str, SitePart], dtype: torch.dtype, max_rank: int) -> Adapter:
    """Read an adapter of a model.

    Args:
        path: of the folder.
        modules: those that something can be added to.
        dtype: of the matrices that are returned.
        max_rank: of any of its modules.

    Raises:
        AdapterError: it is damaged, belongs to another model, or needs what cannot be done here.
    """
    if path.suffix == ".gguf":
        raise AdapterError("it is a GGUF file; adapters are read as PEFT stores them, from a folder")
    config = _config(path / "adapter_config.json")
    found = _matrices(path / "adapter_model.safetensors")
    known = _by_tail(modules)
    factors: dict[str, Factors] = {}
    rank = 0
    for name, (a, b) in found.items():
        module = known.get(_tail(name))
        if module is None:
            raise AdapterError(f"it changes {name!r}, which is not a matrix of this model that adapters can change")
        its = modules[module]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise AdapterError(f"the matrices of {name!r} have shapes {list(a.shape)} and {list(b.shape)}")
        if (b.shape[0], a.shape[1]) != (its.num_outputs, its.num_inputs):
            raise AdapterError(
                f"it belongs to another model: {name!r} has {b.shape[0]} outputs and {a.shape[1]} inputs, "
                f"here they are {its.num_outputs} and {its.num_inputs}"
            )
        if not a.isfinite().all() or not b.isfinite().all():
            raise AdapterError(f"the matrices of {name!r} have numbers that are not finite")
        if a.shape[0] > max_rank:
            raise AdapterError(f"the rank of {name!r} is {a.shape[0]}, more than --max-lora-rank {max_rank}")
        rank = max(rank, a.shape[0])
        factors[module] = Factors(a.to(dtype), (b.float() * _scale(config, name, a.shape[0])).to(dtype))
    if not factors:
        raise AdapterError("it has no matrices")
    return Adapter(factors, rank)


def _config(path: Path) -> _Config:
    try:
        size = path.stat().st_size
        if size > _MAX_CONFIG:
            raise AdapterError(f"{path.name} has {size} bytes; at most {_MAX_CONFIG} are read")
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except OSError as error:
        raise AdapterError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise AdapterError(f"{path.name} cannot be understood: {error}") from None
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
    }
    if wanted := [name for name, value in unserved.items() if value]:
        raise AdapterError(f"it was trained with {', '.join(wanted)}, which is not supported")
    return config


def _matrices(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """The two matrices of each module, by its name in PEFT."""
    halves: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no dictionary)
                match = _FACTOR.fullmatch(key)
                if match is None:
                    raise AdapterError(f"its weight {key[:128]!r} is not supported: only those of linear layers are")
                halves.setdefault(match["module"], {})[match["which"]] = file.get_tensor(key)
    except OSError as error:
        raise AdapterError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise AdapterError(f"{path.name} is damaged: {error}") from None
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
