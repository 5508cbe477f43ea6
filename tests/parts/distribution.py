"""Which parts there are: the toy as an installed distribution, or less than there are."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.config import parts
from penstock.config.parts import GROUP


def install(folder: Path, package: str = "tests.parts.toy") -> Path:
    """Write what `pip install` would, for a part in this package; return the folder that belongs on `sys.path`."""
    name = package.rpartition(".")[2]
    info = folder / f"penstock_{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: penstock-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {package}\n")
    return folder


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Objects of this process that are made meanwhile find all parts but these. (`hiding/` hides them from others.)"""
    left = tuple(package for package in parts.packages() if package.removeprefix(f"{GROUP}.") not in names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "packages", lambda: left)
        parts._listed.cache_clear()
        yield
    parts._listed.cache_clear()
