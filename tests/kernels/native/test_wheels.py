"""What a release's wheels are checked for before they leave `dist/`."""

import importlib.util
import re
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from penstock.kernels.native import build

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheels", ROOT / ".ci" / "wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_functions_that_python_calls_are_looked_for(wheels: ModuleType) -> None:
    source = "".join(path.read_text() for path in sorted((ROOT / "kernels" / "native").rglob("*.py")))
    assert set(re.findall(r"functions\.(penstock_\w+)", source)) <= wheels.functions()


def test_each_machine_has_a_library_for_each_family(wheels: ModuleType) -> None:
    assert {machine: len(families) for machine, families in build._FAMILIES.items()} == wheels.LIBRARIES


def test_a_wheel_with_too_little_is_refused(wheels: ModuleType, tmp_path: Path) -> None:
    names = sorted(wheels.functions())
    path = tmp_path / "made.whl"

    def complaint(*libraries: list[str]) -> str:
        with zipfile.ZipFile(path, "w") as archive:
            for number, exported in enumerate(libraries):
                archive.writestr(f"kernels-{number}.so", "\0".join(["ELF", *exported, ""]))
        found: str = wheels.complaint(path, 2)
        return found

    assert complaint(names, names) == ""
    assert complaint(names) == "it holds 1 libraries instead of 2"
    assert complaint(names, names[1:]) == f"kernels-1.so lacks {names[0]}"
