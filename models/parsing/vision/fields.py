"""Fields that several kinds of vision towers have."""

from collections.abc import Mapping

from penstock.config.options import ConfigError
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.vision.tower import PatchMLP, VisionActivation

MAX_LAYERS = 1024
_ACTIVATIONS: Mapping[str, VisionActivation] = {
    "silu": "silu",
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def activation(its: JsonFields, name: str, usual: str) -> VisionActivation:
    """Return an activation of the tower."""
    said = its.text(name, usual)
    if said not in _ACTIVATIONS:
        raise ConfigError(f"config.json: {name} {said[:64]!r} is not supported")
    return _ACTIVATIONS[said]


def features(fields: JsonFields, depth: int, *, usual: int) -> tuple[int, ...]:
    """Return after how many layers outputs are taken: 0 is the first layer's input, -1 the last layer's output."""
    said = fields.raw("vision_feature_layer")
    said = usual if said is None else said
    listed = said if isinstance(said, list) else [said]
    if not listed or not all(type(number) is int and -depth - 1 <= number <= depth for number in listed):
        raise ConfigError(f"config.json: vision_feature_layer must be of {depth} layers")
    return tuple(number % (depth + 1) for number in listed)


def projector(fields: JsonFields, *, has_bias: bool) -> PatchMLP:
    """Return the projector that turns patches into embeddings; `has_bias`: the default."""
    return PatchMLP(
        activation=activation(fields, "projector_hidden_act", "gelu"),
        has_bias=fields.flag("multimodal_projector_bias", has_bias),
    )
