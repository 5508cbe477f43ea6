"""Finds the parts (`parts/`): what a request may do without. Nothing else in the spine knows of any.

A process asks for the classes that parts bring for it, by their base: the scheduler for `SchedulerPart`s in
`scheduler.py` of each part, a worker for `WorkerPart`s in `worker.py`, and so on. Such a module lists them as `PARTS`.
Parts of other distributions are found by an entry point, whose value is the package of the part's folder:

    [project.entry-points."penstock.parts"]
    counting = "my_package.counting"
"""

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, TypeVar, Union

GROUP = "penstock.parts"
"""Entry points of other distributions, and the package of our own parts."""

_Base = TypeVar("_Base")


@cache
def packages() -> tuple[str, ...]:
    """The packages of all parts, in the order in which they are asked: our own, then others by name."""
    own = import_module(GROUP).NAMES if _is_there(GROUP) else ()
    others = sorted({point.value for point in entry_points(group=GROUP)})
    return (*(f"{GROUP}.{name}" for name in own), *others)


@cache
def _listed(file: str, name: str) -> tuple[Any, ...]:
    """All that the parts' modules of this name list under that name."""
    found: list[Any] = []
    for package in packages():
        if _is_there(package) and _is_there(f"{package}.{file}"):
            found += getattr(import_module(f"{package}.{file}"), name, ())
    return tuple(found)


def _is_there(module: str) -> bool:
    """Whether there is such a module; its package must have been found."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # hidden by an import hook
        return False


def brought(file: str, base: type[_Base]) -> tuple[type[_Base], ...]:
    """The subclasses of `base` in `PARTS` of each part's `file`."""
    return tuple(kind for kind in _listed(file, "PARTS") if issubclass(kind, base))


def metrics() -> tuple[Any, ...]:
    """What `/metrics` shows of engines' parts: `METRICS` of their `metrics.py`."""
    return _listed("metrics", "METRICS")


def messages(direction: str) -> tuple[type, ...]:
    """What parts say in a direction: `TO_WORKER`, `FROM_WORKER`, `TO_FRONTEND` or `FROM_FRONTEND` of `messages.py`."""
    return _listed("messages", direction)


def with_parts(spine: Any, direction: str) -> Any:
    """A union of messages, with those that parts say in a direction (as in `messages`)."""
    return Union[(spine, *messages(direction))]
