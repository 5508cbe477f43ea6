"""Shared by the families of encoders: reading common fields, and registration."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from penstock.config.options import ConfigError
from penstock.models.description.encoder import Encoder
from penstock.models.parsing.family import Family
from penstock.models.parsing.json_fields import JsonFields
from penstock.models.weights.encoder import encoder_tensors

CLASSIFIES = "ForSequenceClassification"
"""The end of the name of an architecture whose head classifies texts."""

_REDUNDANT = (".position_ids", ".token_type_ids", ".inv_freq")
_OTHER_HEADS = ("cls.", "lm_head.", "decoder.", "head.", "pooler.")


def encoder_family(
    architectures: Sequence[str],
    parse: Callable[[str, JsonFields], Encoder],
    *,
    base: str,
    heads: tuple[str, ...] = (),
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> Family[Encoder]:
    """Return a family of encoders.

    Args:
        architectures: their names in config.json.
        parse: as `Family.parse`.
        base: the beginning of all names but the heads'; checkpoints of the model without a head lack it.
        heads: beginnings of the names of heads.
        renamed: parts of names that checkpoints may have -> those of the description.
    """
    outside = (base, "classifier.", *heads)

    def known_as(name: str) -> str:
        for other, known in renamed.items():
            name = name.replace(other, known)
        return name if name.startswith(outside) else base + name

    def ignores(name: str, encoder: Encoder) -> bool:
        """Heads that predict masked tokens, and poolers, change no hidden state."""
        its = name.removeprefix(base)
        return name.endswith(_REDUNDANT) or name.startswith(_OTHER_HEADS) or its.startswith(_OTHER_HEADS)

    return Family(
        architectures=tuple(architectures),
        parse=parse,
        tensors=encoder_tensors,
        matrices=lambda encoder: {},
        ignores=ignores,
        known_as=known_as,
        build="penstock.gpu_worker.models.loading.encoder_build:build",
    )


def num_classes(fields: JsonFields) -> int:
    """Return how many classes there are; two if config.json does not say."""
    labels = fields.object("id2label")
    named = 0 if labels is None else len(labels.names())
    return fields.whole("num_labels", named or 2)


def refuse(fields: JsonFields, **allowed: object) -> None:
    """Refuse values other than these of fields that config.json has.

    Raises:
        ConfigError: with the field, its value, and what is supported.
    """
    for name, value in allowed.items():
        found = fields.raw(name)
        if found is not None and found != value:
            raise ConfigError(f"config.json: {name} {str(found)[:64]!r} is not supported; supported: {value}")
