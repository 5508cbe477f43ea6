"""Fields that all vision towers have."""

from collections.abc import Mapping

from penstock.core.checkpoint.parsing.json_fields import JsonFields
from penstock.core.checkpoint.vision import VisionActivation
from penstock.core.config.options import ConfigError

MAX_LAYERS = 1024
_ACTIVATIONS: Mapping[str, VisionActivation] = {
    "silu": "silu",
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def activation(its: JsonFields, name: str, usual: str) -> VisionActivation:
    """An activation of the tower."""
    said = its.text(name, usual)
    if said not in _ACTIVATIONS:
        raise ConfigError(f"config.json: {name} {said[:64]!r} is not supported")
    return _ACTIVATIONS[said]
