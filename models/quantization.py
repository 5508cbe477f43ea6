"""Applies `--quantization` to a checkpoint, and to each of its matrices."""

import math
import re
from collections.abc import Mapping

from msgspec.structs import replace

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Decoder
from penstock.models.description.model_config import ModelConfig
from penstock.models.formats.made import LEAST_WEIGHTS, MADE_FORMATS, MadeAtLoad, Recipe, at_load
from penstock.models.weights.decoder import Product, decoder_products

_NONE = ("", "none", "None", "null")
_SAME = {"gptq_marlin": "gptq", "awq_marlin": "awq"}
"""Other engines' names of methods, after their kernels -> the name in config.json."""


def with_quantization(config: ModelConfig, wanted: str) -> ModelConfig:
    """Return the configuration of the model that is served.

    Args:
        config: the checkpoint's.
        wanted: a format that can be made at load, or the checkpoint's own method; empty: the checkpoint's own.

    Raises:
        ConfigError: the checkpoint has another method, or the format cannot be made from it.
    """
    stored = config.quantization
    if wanted in _NONE:
        return config
    if stored is not None:
        if re.split(r"[ ,]", stored.name.lower())[0] == _SAME.get(wanted, wanted):
            return config
        raise ConfigError(
            f"--quantization {wanted}: this checkpoint is quantized already ({stored.name}); leave the option out, "
            "or serve the checkpoint that it was made from"
        )
    made = next((format for format in MADE_FORMATS if format == wanted), None)
    if made is None:
        raise ConfigError(
            f"--quantization {wanted}: the weights of this checkpoint are floats; of these can be made: "
            f"{', '.join(MADE_FORMATS)}"
        )
    if not isinstance(config, Decoder):
        raise ConfigError(f"--quantization {wanted}: {config.architecture} {config.why_whole}, with floats only")
    return replace(config, quantization=at_load(made))


def products_of(config: ModelConfig) -> dict[str, Product]:
    """Return the matrices that can be quantized, by their names in the checkpoint."""
    return decoder_products(config) if isinstance(config, Decoder) else {}


def recipes_of(config: ModelConfig) -> Mapping[str, Recipe]:
    """Return the recipe of each matrix that is quantized at load."""
    made = config.quantization
    if not isinstance(made, MadeAtLoad):
        return {}
    return {
        name: made.head if product.is_head else made.body
        for name, product in products_of(config).items()
        if math.prod(product.shape[-2:]) >= LEAST_WEIGHTS
    }
