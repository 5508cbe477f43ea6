"""Fields of a checkpoint's JSON files. They are untrusted, so each field's type is checked when it is read."""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from penstock.config.options import ConfigError

_MAX_SHOWN = 64


class JsonFields:
    """A JSON object, with its file's name for messages. A field that is null counts as absent."""

    def __init__(self, file: str, fields: Mapping[str, Any]) -> None:
        self._file = file
        self._fields = fields

    def changed(self, **fields: Any) -> "JsonFields":
        """The same object with other values for some fields."""
        return JsonFields(self._file, {**self._fields, **fields})

    def raw(self, name: str) -> Any:
        """The raw value; None if it is absent."""
        return self._fields.get(name)

    def names(self) -> list[str]:
        """The fields that are present and not null."""
        return [name for name, value in self._fields.items() if value is not None]

    def has(self, name: str) -> bool:
        """Whether a field is present, even as null."""
        return name in self._fields

    def whole(self, name: str, default: int | None = None, *, least: int = 1, most: int = 1 << 30) -> int:
        """An integer.

        Raises:
            ConfigError: it is not an integer, out of bounds, or absent without a default.
        """
        value = self._fields.get(name)
        if value is None and default is not None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            kind = "a positive integer" if least == 1 else f"an integer from {least}"
            self._refuse(name, f"{kind} up to {most}")
        return value

    def number(self, name: str, default: float, *, least: float = 0.0) -> float:
        """A finite number of at least `least`; an integer counts as one."""
        value = self._fields.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value) or value < least:
            self._refuse(name, f"a number of at least {least:g}")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers; empty if it is absent."""
        value = self._fields.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(item) in (int, float) and _is_finite(item) for item in value):
            self._refuse(name, "a list of numbers")
        return tuple(map(float, value))

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._refuse(name, "true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        """A string."""
        value = self._fields.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            self._refuse(name, "a string")
        return value

    def texts(self, name: str) -> list[str] | None:
        """A list of strings; None if it is absent."""
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._refuse(name, "a list of strings")
        return value

    def wholes(self, name: str) -> list[int]:
        """A list of integers of at least 0; empty if it is absent."""
        value = self._fields.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            self._refuse(name, "a list of integers from 0")
        return value

    def object(self, name: str) -> "JsonFields | None":
        """An object within this one; None if it is absent or empty."""
        value = self._fields.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            self._refuse(name, "an object")
        return JsonFields(f"{self._file}: {name}", value)

    def with_fields(self, more: Mapping[str, Any]) -> "JsonFields":
        """Return the object with added or replaced fields."""
        return JsonFields(self._file, {**self._fields, **more})

    def has_objects(self) -> bool:
        """Whether any field is an object."""
        return any(isinstance(value, dict) for value in self._fields.values())

    def _refuse(self, name: str, wanted: str) -> NoReturn:
        raise ConfigError(f"{self._file}: {name} must be {wanted}, got {shown(repr(self._fields.get(name)))}")


def shown(text: str) -> str:
    """Return a file's text for a message: short, and on one line."""
    text = text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
    return text if text.isprintable() else repr(text)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False
