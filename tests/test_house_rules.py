"""Rules of the house, checked on the source text itself."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging import data, packages

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "ipc": set[str](),
    "config": {"ipc"},
    "models": {"ipc", "config"},
    "core": {"ipc", "config", "models"},
    "frontend": {"ipc", "config", "models"},
    "kernels": set[str](),
    "gpu_worker": {"ipc", "kernels", "config", "models"},
    "cli": {"ipc", "config", "models", "core", "frontend", "lab"},
    "parts": {"ipc", "config", "models", "core", "frontend", "kernels", "gpu_worker"},
}
"""Folder -> what of ours it may import besides itself."""
PART_MAY_IMPORT = {
    "worker": {"ipc", "kernels", "config", "models", "gpu_worker"},
    "scheduler": MAY_IMPORT["core"] | {"core"},
    "frontend": MAY_IMPORT["frontend"] | {"frontend"},
    "child": MAY_IMPORT["frontend"] | {"frontend"},
    "metrics": MAY_IMPORT["frontend"] | {"frontend"},
    "options": {"ipc", "config"},
    "messages": {"ipc"},
}
"""File of a part, named after its process -> what it may import besides its own part."""
FLOORS = {
    "core": ("kv", "sequences", "steps", "scheduling", "engine", "launch"),
    "frontend": (
        "ground", "storage", "exchange", "part", "streams", "text", "parsing", "engine",
        "validation", "api", "embeddings", "web", "http",
    ),
    "gpu_worker": ("devices", "parallel", "state", "formats", "models", "part", "steps", "startup", "ground"),
}  # fmt: skip
"""Folder -> its rooms from the bottom up: each may import those before it. A file may stand there like a
room; `ground` is the folder's other files."""
WITHOUT_TORCH = ("cli", "config", "core", "frontend", "ipc", "models")
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_NAMES = {"utils.py", "helpers.py", "misc.py"}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def without_types(tree: ast.AST) -> ast.AST:
    """The module without what only type checkers read: samplers are written with torch's tensors, not with torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [each for each in node.body if getattr(each, "module", "") != "torch"] or [ast.Pass()]
    return tree


PACKAGES = sources("penstock", *MAY_IMPORT, "bench", "demo", "deploy", "lab")


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_file(path: Path) -> None:
    text = path.read_text()
    folder = path.relative_to(ROOT).parts[0]
    tree = ast.parse(text)
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


@pytest.mark.parametrize("path", sources("parts"), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_part_keeps_its_processes_apart(path: Path) -> None:
    _, part, *inside = path.relative_to(ROOT).with_suffix("").parts
    if not inside or inside[0] == "__init__":
        return
    file = inside[0]  # named after the process, or what its processes share
    others = PART_MAY_IMPORT.keys() - {file, "messages", "options"}
    for name in imports(without_types(ast.parse(path.read_text()))):
        words = [*name.split("."), "", "", ""]
        root, folder, of_part, its_file = words[:4]
        barred = {"worker": set[str](), "child": {"torch", "triton"}}.get(file, {"torch", "transformers", "triton"})
        assert root not in barred, f"{path} imports {name}"
        if root == "penstock" and folder == "parts":
            assert of_part == part, f"{path} imports {name}, of another part"
            assert its_file not in others, f"{path} imports {name}, which runs in another process"
        elif root == "penstock":
            assert (folder, of_part) != ("frontend", "http"), f"{path} imports {name}, which imports parts"
            assert folder in PART_MAY_IMPORT.get(file, {"ipc", "config", "models"}), f"{path} imports {name}"


def room(module: str) -> str:
    """The room of a module of ours, given without `penstock.`: `core.kv.page_pool` is in `kv`."""
    parts = module.split(".")
    is_file = (ROOT / "/".join(parts[:2])).with_suffix(".py").exists()
    if is_file and parts[1] in FLOORS[parts[0]]:
        return parts[1]
    return "ground" if len(parts) < 3 and is_file else parts[1] if len(parts) > 1 else "ground"


@pytest.mark.parametrize(
    "path",
    [path for path in sources(*FLOORS) if path.name not in ("__init__.py", "__main__.py")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_rooms_import_downwards_only(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    floors = FLOORS[folder]
    own = floors.index(room(".".join(path.relative_to(ROOT).with_suffix("").parts)))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"penstock.{folder}"):
            module = (node.module or "").removeprefix("penstock.")
            for full in [f"{module}.{alias.name}" for alias in node.names] if "." not in module else [module]:
                assert floors.index(room(full)) <= own, f"{path} imports {full}, which is on a higher floor"


def imported_rooms(folder: str) -> dict[str, set[str]]:
    """Each room of a folder -> the other rooms that its files import; the folder's entry points are left out."""
    found: dict[str, set[str]] = {}
    for path in sources(folder):
        own = room(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name in imports(ast.parse(path.read_text())):
            if own != "ground" and name.startswith(f"penstock.{folder}"):
                found.setdefault(own, set()).add(room(name.removeprefix("penstock.")))
    return {own: others - {own} for own, others in found.items()}


def test_the_imports_that_are_drawn_are_those_there_are() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    drawn = re.findall(r"^ (\w+)/(\w+) +→ (.+)$", page, re.MULTILINE)
    rooms = {(folder, name): set(others.replace("(files)", "ground").split(", ")) for folder, name, others in drawn}
    there = {(folder, own): others for folder in FLOORS for own, others in imported_rooms(folder).items() if others}
    assert rooms == there


def test_packages_are_found_where_their_names_say() -> None:
    """Without an installation: a link in `penstock/` for each folder, and a package for each folder with sources."""
    folders = {
        path.parent for path in sources("penstock", *MAY_IMPORT, "lab", "bench/load", "bench/quality", "deploy/ray")
    }
    assert set(packages().values()) == folders


def test_packages_bring_the_files_that_they_read() -> None:
    """An installed package has what `package-data` names, and nothing else that lies beside its sources."""
    kinds = {".json", ".toml", ".txt", ".safetensors", ".jinja", ".cpp", ".h"}
    found = {path for folder in packages().values() for path in folder.rglob("*") if path.suffix in kinds}
    assert found - data() == set()


def test_of_the_demo_model_its_files_are_installed_and_nothing_that_makes_it() -> None:
    """What makes it runs from a clone; nothing that is installed may need it to start."""
    installed = {path.relative_to(ROOT) for path in data() if path.is_relative_to(ROOT / "demo")}
    there = {path.relative_to(ROOT) for name in ("head", "model") for path in (ROOT / "demo" / name).iterdir()}
    assert installed == there
    for folder in packages().values():
        for path in folder.glob("*.py"):
            at_start = [
                node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)
            ]
            assert not any(name.startswith("penstock.demo") for node in at_start for name in imports(node)), path


@pytest.mark.parametrize(
    "module", ["penstock.core.engine.loop", "penstock.cli.servers", "penstock.core.launch.supervisor"]
)
def test_the_scheduler_process_never_loads_torch(module: str) -> None:
    check = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
