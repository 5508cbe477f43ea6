"""The message for an unsupported architecture: what it is, the nearest supported one, and what differs.

The fields that an architecture knows are read from the source text of its configuration class in `transformers`.
"""

import ast
import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import cache

from penstock.config.options import ModelImpl
from penstock.models.parsing.by_transformers import architectures as transformers_architectures
from penstock.models.parsing.by_transformers import (
    computes_by_transformers,
    layers_without_kv,
    names_other_layers,
    source_text,
)
from penstock.models.parsing.json_fields import JsonFields, shown
from penstock.models.parsing.vision.foreign import NOT_SERVED

_OTHER_SENSES = {
    "images": ("vision_config", "image_token_id", "image_token_index"),
    "sound": ("audio_config", "audio_token_id", "audio_token_index"),
}
_OTHER_HEADS = (
    *("ForMaskedLM", "Classification", "QuestionAnswering", "MultipleChoice", "Retrieval", "PreTraining"),
    *("Model", "Encoder"),
)
_SUFFIX = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model|Encoder)$")
_OF_EVERY_MODEL = frozenset(("architectures", "auto_map", "dtype", "model_type", "rope_scaling", "rope_theta"))
"""Fields that older or all configuration files have, but no class lists."""
_NAME_WEIGHT = 8.0
"""An equal name outweighs this many differing fields."""
_SAME_NAME = 0.75
"""Least similarity of two names, without their endings, that may mean the same."""
_MAX_SHOWN = 3
_MAX_TRIED = 16
"""The nearest architectures that are looked at. One that is farther away would help nobody."""


Serves = Callable[[str, JsonFields], bool]
"""Whether a config.json can be served as one of an architecture."""


def why_not(named: list[str], fields: JsonFields, own: Sequence[str], impl: ModelImpl, serves: Serves) -> str:
    """Return why these architectures are not supported; `own`: those with our own code."""
    if not named:
        return f"config.json: architectures names none; it must name a supported one, such as {own[0]}"
    found = shown(named[0])
    said = f"architecture {found} is not supported" + " with --model-impl own" * (impl == "own")
    supported = [*own] if impl == "own" else _supported(own)
    other, kinds = _other_kind(found, fields), layers_without_kv(fields)
    if other:
        sibling = _SUFFIX.sub("ForCausalLM", found)
        return f"{said}{other}" + (f"; {sibling} is" if sibling in supported else "")
    if kinds:
        said += f": config.json has layers of kind {', '.join(kinds)}"
    near, differs = _nearest(found, fields, supported, serves)
    if not near:
        return said
    if not (kinds or differs) and _likeness(found, near) > _SAME_NAME:
        differs = ", which knows the same fields of config.json: if it is that, name it there"
    return f"{said}; the nearest that is: {near}{differs}"


def nearest(architecture: str, fields: JsonFields, own: Sequence[str], serves: Serves) -> str:
    """Return the nearest supported architecture, by name and fields, and what differs; empty if none is near."""
    near = "".join(_nearest(architecture, fields, _supported(own), serves))
    return f"; the nearest that is: {near}" if near else ""


def _nearest(architecture: str, fields: JsonFields, supported: Sequence[str], serves: Serves) -> tuple[str, str]:
    given = frozenset(name for name in fields.names() if not name.startswith("_")) - _OF_EVERY_MODEL - _of_all_models()

    def distance(name: str) -> float:
        known = _fields_of(name)
        differing = len(given - known) + len(known - given) / 4 if known else len(given)
        return differing - _NAME_WEIGHT * _likeness(architecture, name)

    in_order = sorted((name for name in supported if name != architecture), key=distance)
    near = next((name for name in in_order[:_MAX_TRIED] if _serves_all(name, fields, serves)), "")
    unknown = sorted(given - _fields_of(near)) if near and _fields_of(near) else []
    if not unknown:
        return near, ""
    some = ", ".join(map(shown, unknown[:_MAX_SHOWN]))
    more = f" and {len(unknown) - _MAX_SHOWN} more" if len(unknown) > _MAX_SHOWN else ""
    return near, f", which does not know these fields of config.json: {some}{more}"


def _serves_all(name: str, fields: JsonFields, serves: Serves) -> bool:
    """Whether a config.json can be served under this name, and its kinds of layers are not overlooked there."""
    if not serves(name, fields):
        return False
    kinds = fields.texts("layer_types")
    return not (kinds and layers_without_kv(fields)) or not serves(name, fields.changed(layer_types=["?"] * len(kinds)))


def _supported(own: Sequence[str]) -> list[str]:
    others = (name for name in transformers_architectures() if name.endswith("ForCausalLM"))
    ours = (name for name in own if not name.endswith("TextModel"))  # parts of larger models, whose names files have
    return [*ours, *(name for name in others if name not in own and _is_computed(name))]


def _is_computed(name: str) -> bool:
    return computes_by_transformers(name) and not names_other_layers(name)


def _likeness(architecture: str, other: str) -> float:
    return SequenceMatcher(None, _SUFFIX.sub("", architecture), _SUFFIX.sub("", other), autojunk=False).ratio()


def _other_kind(architecture: str, fields: JsonFields) -> str:
    """Return the kind of a model that does not generate text."""
    senses = [sense for sense, names in _OTHER_SENSES.items() if any(fields.raw(name) is not None for name in names)]
    if architecture in NOT_SERVED:
        return f" ({NOT_SERVED[architecture]})"
    if senses:
        return f" (it takes {' and '.join(senses)} in a way that is not supported)"
    if fields.raw("is_encoder_decoder") is True:
        return " (it is an encoder and a decoder; only models that continue a text are served)"
    if architecture.endswith(_OTHER_HEADS):
        return " (it gives vectors or labels; only models that continue a text are served)"
    return ""


@cache
def _fields_of(architecture: str) -> frozenset[str]:
    """Return the fields of an architecture's configuration; empty if unknown."""
    kind = transformers_architectures().get(architecture, "").replace("-", "_")
    text = source_text(f"models/{kind.removesuffix('_text')}/configuration_{kind.removesuffix('_text')}.py")
    named = f'model_type = "{transformers_architectures().get(architecture, "")}"'
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    own = [node for node in classes if named in (ast.get_source_segment(text, node) or "")]
    return frozenset(field for node in own for field in _annotated(node))


@cache
def _of_all_models() -> frozenset[str]:
    tree = ast.parse(source_text("configuration_utils.py"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return frozenset(field for node in classes for field in _annotated(node)) | {"transformers_version", "torch_dtype"}


def _annotated(node: ast.ClassDef) -> list[str]:
    return [
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    ]
