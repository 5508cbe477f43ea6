"""This program's name and version."""

from importlib import metadata

DISTRIBUTION = "penstock-llm"
"""What pip calls this package: on the package index the name `penstock` belongs to another project."""
NAME = "penstock"
"""Also used as the `Server` header, which must not reveal versions."""


def _installed_version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0+source"


VERSION = _installed_version()
