"""What pyproject.toml installs of the clone."""

import tomllib
from pathlib import Path

from setuptools import find_packages

ROOT = Path(__file__).parent.parent
_SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def packages() -> dict[str, Path]:
    """Each package that is installed -> its folder, where it really is."""
    found = _SETTINGS["packages"]["find"]
    names = find_packages(str(ROOT), include=found["include"], exclude=found["exclude"])
    return {name: (ROOT / name.replace(".", "/")).resolve() for name in names}


def data() -> set[Path]:
    """The files that are installed beside the packages' sources, where they really are."""
    globs = _SETTINGS["package-data"]
    return {
        path.resolve()
        for name, folder in packages().items()
        for glob in globs.get(name, ())
        for path in folder.glob(glob)
    }
