"""Shared by the formats: names of modules, rules that select modules, and counts of groups and words."""

import math
import re
from collections.abc import Iterable
from typing import Literal

from penstock.config.options import ConfigError
from penstock.models.formats.format import Along
from penstock.models.parsing.json_fields import shown

_WORD = 32


def stem_of(name: str) -> str:
    """Return the module that a weight belongs to: its name without ".weight"."""
    return name.removesuffix(".weight")


def pattern(text: str) -> re.Pattern[str]:
    """Compile a regular expression from a checkpoint.

    Raises:
        ConfigError: it is invalid.
    """
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"quantization_config: {shown(text)} is no regular expression ({error})") from None


class KeptModules:
    """Modules that are not quantized, by transformers' rules for `modules_to_not_convert`.

    An entry matches the end of a module's name, or, as a regular expression, its beginning up to a dot.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._endings = tuple(entries)
        self._beginnings = [pattern(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))") for entry in self._endings]

    def __contains__(self, stem: str) -> bool:
        return stem.endswith(self._endings) or any(found.match(stem) for found in self._beginnings)


def num_groups(num_inputs: int, size: int | None) -> int:
    """Return how many groups of this size there are; None: one group of all."""
    return 1 if size is None else -(-num_inputs // size)


def along_groups(axis: Literal["outputs", "inputs"], size: int | None) -> Along | None:
    """Return the axis of per-group data; `size` None: one group of all."""
    return None if size is None else Along(axis, size)


def along_words(axis: Literal["outputs", "inputs"], bits: int) -> Along:
    """Return the axis of 32-bit words that hold an axis's codes, packed one after the other."""
    common = math.gcd(_WORD, bits)
    return Along(axis, _WORD // common, bits // common)


def num_words(count: int, bits: int) -> int:
    """Return how many 32-bit words hold `count` codes, packed one after the other."""
    return -(-count * bits // _WORD)
