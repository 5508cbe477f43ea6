"""The private parts of libraries that this package uses: checked when a frontend starts.

The version bounds in pyproject.toml exclude other releases. If another one is installed, an error names the part.
"""

import inspect
from importlib.metadata import version

import jinja2.compiler
from aiohttp import web

from penstock.config import ConfigError
from penstock.ipc.version import DISTRIBUTION

_PARTS: dict[str, dict[type, tuple[str, ...]]] = {
    "aiohttp": {
        web.RequestHandler: (
            *("_buffer_paused", "_drain_helper", "_force_close", "_manager", "_messages", "_paused"),
            *("_reading_paused", "_request_count", "force_close", "handle_error", "pause_writing", "transport"),
        ),
        web.Server: ("_connections",),
    },
    "jinja2": {jinja2.compiler.CodeGenerator: ("_output_child_to_const", "optimizer")},
}


def check_private_parts() -> None:
    """Check every private part that is used.

    Raises:
        ConfigError: naming the library's version and what it lacks.
    """
    for library, classes in _PARTS.items():
        for owner, names in classes.items():
            absent = [name for name in names if not _has(owner, name)]
            if absent:
                raise ConfigError(
                    f"{library} {version(library)} has no {owner.__name__}.{absent[0]}, which Penstock needs; "
                    f"install a release that Penstock supports: pip install --force-reinstall {DISTRIBUTION}"
                )


def _has(owner: type, name: str) -> bool:
    """Whether instances have an attribute: one of the class, or one that a method assigns."""
    if hasattr(owner, name):
        return True
    methods = [method for kind in owner.__mro__ for method in vars(kind).values() if inspect.isfunction(method)]
    return any(name in method.__code__.co_names for method in methods)
