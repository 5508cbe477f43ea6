"""How parts are found."""

import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

from penstock.config import parts


class Base:
    """What the parts below are."""


@pytest.fixture(autouse=True)
def _looks_again() -> Iterator[None]:
    for cached in (parts.packages, parts._listed):
        cached.cache_clear()
    yield
    for cached in (parts.packages, parts._listed):
        cached.cache_clear()


def test_a_part_of_another_distribution_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_parts" / "counting"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "scheduler.py").write_text(
        f"from {__name__} import Base\n\n\nclass Mine(Base):\n    pass\n\n\nPARTS = (Mine,)\n"
    )
    info = tmp_path / "my_parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{parts.GROUP}]\ncounting = my_parts.counting\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert parts.packages()[-1] == "my_parts.counting"
    assert [kind.__name__ for kind in parts.brought("scheduler", Base)] == ["Mine"]
    assert parts.brought("worker", Base) == ()


def test_parts_that_are_hidden_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hides(MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> None:
            if name == parts.GROUP or name.startswith(f"{parts.GROUP}."):
                raise ModuleNotFoundError(name)

    for name in [name for name in sys.modules if name.startswith(parts.GROUP)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hides(), *sys.meta_path])
    assert not any(package.startswith(parts.GROUP) for package in parts.packages())
