"""Rules of the house, checked on the source text itself."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "ipc": set[str](),
    "core": {"ipc"},
    "frontend": {"ipc", "core.config"},
    "kernels": set[str](),
    "gpu_worker": {"ipc", "kernels", "core.config"},
}
"""Folder -> what of ours it may import besides itself."""
WITHOUT_TORCH = ("core", "frontend", "ipc")
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_NAMES = {"utils.py", "helpers.py", "misc.py"}
MAX_LINES = 600


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


PACKAGES = sources(*MAY_IMPORT, "bench", "demo")


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_file(path: Path) -> None:
    text = path.read_text()
    folder = path.relative_to(ROOT).parts[0]
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MAX_LINES, f"{path} is too long"
    assert path.name not in FORBIDDEN_NAMES
    for name in imports(tree):
        root = name.split(".")[0]
        assert root not in FORBIDDEN_MODULES, f"{path} imports {name}"
        if folder in WITHOUT_TORCH:
            assert root not in {"torch", "transformers", "triton"}, f"{path} imports {name}"
        if root == "penstock" and folder in MAY_IMPORT:
            target = name.removeprefix("penstock.")
            allowed = MAY_IMPORT[folder] | {folder}
            assert any(target == a or target.startswith(a + ".") for a in allowed), f"{path} imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):  # python -O takes it away: it may state what is so, and not make it so
            made = [n for n in ast.walk(node.test) if isinstance(n, ast.Call | ast.NamedExpr | ast.Await)]
            names = [n.func.id for n in made if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
            assert names == ["isinstance"] * len(made), f"{path}:{node.lineno} does something in an assert"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec", "__import__"}, f"{path}:{node.lineno} calls {node.func.id}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            call = ast.unparse(node.func)
            assert call not in {"torch.load", "torch.save"}, f"{path}:{node.lineno} calls {call}"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{path}:{node.lineno} has a bare except"


def test_packages_bring_the_files_that_they_read() -> None:
    """An installed package has what `package-data` names, and nothing else that lies beside its sources."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {name: ROOT / name.removeprefix("penstock.").replace(".", "/") for name in settings["packages"]}
    data = settings["package-data"]
    brought = {path for name, folder in folders.items() for glob in data.get(name, ()) for path in folder.glob(glob)}
    kinds = {".json", ".toml", ".txt", ".safetensors", ".jinja", ".cpp", ".h"}
    found = {path for folder in folders.values() for path in folder.rglob("*") if path.suffix in kinds}
    read = {path for path in found if ROOT / "bench/results" not in path.parents}
    assert read - brought == set()


@pytest.mark.parametrize("module", ["penstock.core.engine", "penstock.core.cli", "penstock.core.supervisor"])
def test_the_scheduler_process_never_loads_torch(module: str) -> None:
    check = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
