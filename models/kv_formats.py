"""The format of keys and values, from the option and what the model allows."""

from typing import Literal

from penstock.config.options import ConfigError, KVCacheDType
from penstock.models.description.model_config import ModelConfig
from penstock.models.parsing.by_transformers import TransformersConfig

KVFormatName = Literal["fp8_e4m3", "fp8_e5m2", "int8", "int4"]


def kv_format_of(wanted: KVCacheDType, model: ModelConfig) -> KVFormatName | None:
    """Return the format of a model's pages; None if they have the dtype of activations.

    Raises:
        ConfigError: this model's pages cannot have the wanted format.
    """
    why = _cannot_be_quantized(model)
    if wanted == "auto":
        return model.kv_scales if why is None else None
    if why is not None:
        raise ConfigError(f"--kv-cache-dtype {wanted} is not supported {why}; leave it out, or say auto")
    return "fp8_e4m3" if wanted == "fp8" else wanted


def _cannot_be_quantized(model: ModelConfig) -> str | None:
    if isinstance(model, TransformersConfig):
        return f"for {model.architecture}, which runs through transformers' code"
    if any(not shape.value_dim for shape in model.kv):
        return f"for {model.architecture}, which keeps latents rather than keys and values"
    if any(shape.key_dim % 2 for shape in model.kv):
        return f"for {model.architecture}, whose heads have an odd size"
    return None
