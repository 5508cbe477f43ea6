"""The interface of a model family: how its checkpoints are read, and what builds the model."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from penstock.config.options import ConfigError
from penstock.models.description.model_config import ModelConfig
from penstock.models.parsing.json_fields import JsonFields

Shape = tuple[int, ...]
Config = TypeVar("Config", bound=ModelConfig)


class NotDescribed(ConfigError):
    """A variant that our own blocks cannot compute, though `transformers`' code may."""


class Family(NamedTuple, Generic[Config]):
    """Architectures that are parsed and built in the same way."""

    architectures: tuple[str, ...]
    """Their names in config.json."""
    parse: Callable[[str, JsonFields], Config]
    """Parses an architecture's name and config.json's fields. Raises ConfigError for what is not supported."""
    tensors: Callable[[Config], dict[str, Shape]] | None
    """Returns every tensor that the checkpoint must have; a model without any has no weight files. None: only the
    builder knows."""
    matrices: Callable[[Config], dict[str, Shape]]
    """Returns those of `tensors` that may be quantized, with their shapes [..., outputs, inputs]."""
    ignores: Callable[[str, Config], bool]
    """Whether another tensor of the checkpoint is known to be redundant."""
    known_as: Callable[[str], str]
    """Returns a stored tensor's name in `tensors`: some checkpoints leave out the beginning of names."""
    build: str
    """"module:function" that builds the model: see `gpu_worker/models/model.py`. Only the worker imports it, because it
    imports torch."""
