"""Descriptions with one option left out: what a model would be if we overlooked it."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import fields, replace

from penstock.models.description.decoder import Attention, Decoder, Layer
from penstock.models.parsing.rope import RopeConfig

Path = tuple[str, ...]

_SIZES = {"architecture", "checkpoint_dtype", "has_page_groups", "layers", "names", "tied_embeddings"}
_TOO_SMALL = {"eps", "renormalize_eps", "embedding_scale_is_rounded"}
"""They change no more than rounding does in fp32."""

_OF_PICTURES = {"sections", "sections_alternate"}
"""In a text, time, row and column of a position are the same."""

_WITHOUT_EFFECT = {("beside_mlp", "experts", "router", "renormalize")}
"""Of what they scale, a norm is taken."""
_OF_NORMS = {"norms_span", "norms_follow_rope"}


def without_each_option(decoder: Decoder) -> Iterator[tuple[str, Decoder]]:
    """Each option's path, and the description without it, in all layers that have it."""
    for path in sorted(set(_options(decoder))):
        yield ".".join(path), _without(decoder, path)
    for path in sorted({path for layer in decoder.layers for path in _options(layer)} - _WITHOUT_EFFECT):
        yield ".".join(path), replace(decoder, layers=tuple(_without(layer, path) for layer in decoder.layers))


def _options(part: msgspec.Struct) -> Iterator[Path]:
    """The fields that are not what they usually are, in this part of a description and in the parts of it."""
    for field in fields(part):
        value, usual = getattr(part, field.name), _usual(part, field)
        has_norms = not isinstance(part, Attention) or part.q_norm is not None
        if field.name in _SIZES | _TOO_SMALL | _OF_PICTURES or (field.name in _OF_NORMS and not has_norms):
            continue
        if usual is not msgspec.NODEFAULT and value != usual:
            yield (field.name,)
        if isinstance(value, msgspec.Struct):
            yield from ((field.name, *path) for path in _options(value))


def _usual(part: msgspec.Struct, field: Any) -> Any:
    """What a field is if the option is not there."""
    if isinstance(part, Attention) and field.name == "scale":
        return part.head_dim**-0.5
    if isinstance(part, RopeConfig) and field.name == "kind":
        return "default"
    if isinstance(part, RopeConfig) and field.name in ("short_factors", "long_factors"):
        return tuple(1.0 for _ in getattr(part, field.name))
    if isinstance(part, Layer) and field.name in ("mixer_norm", "mlp_norm"):
        return msgspec.NODEFAULT  # their absence is what is special
    return field.default


def _without(part: Any, path: Path) -> Any:
    """The same, where this part has the option at all."""
    name, *rest = path
    if not isinstance(part, msgspec.Struct) or not hasattr(part, name):
        return part
    if rest:
        return replace(part, **{name: _without(getattr(part, name), tuple(rest))})
    (field,) = (field for field in fields(part) if field.name == name)
    return replace(part, **{name: _usual(part, field)})
