"""Who of some objects overrides a method of their base: asked once, at the start, so that the others cost nothing."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_Part = TypeVar("_Part")


def overriding(base: type[_Part], parts: Iterable[_Part], name: str) -> list[_Part]:
    """The parts that have a method or property of their own by this name."""
    return [part for part in parts if getattr(type(part), name) is not getattr(base, name)]


def calls(base: type[_Part], parts: Iterable[_Part], name: str) -> list[Callable[..., Any]]:
    """The methods by this name of the parts that override it."""
    return [getattr(part, name) for part in overriding(base, parts, name)]
