"""The house in figures: `python -m tests.house_figures [--request]`.

They describe it, and nothing is enforced: a file may be as long as its one job needs, and nothing is split, joined or
renamed for a figure's sake. `--request` also starts a server, and counts the lines of the files that a plain streaming
chat request enters.
"""

import argparse
import ast
import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from penstock.config.flags import flags
from tests.request_path import files_of_a_request

ROOT = Path(__file__).parent.parent
FOLDERS = ("cli", "config", "core", "frontend", "gpu_worker", "ipc", "kernels", "lab", "models", "parts", "penstock")
MOST_METHODS, MOST_ARGUMENTS = 20, 7


def sources() -> dict[str, Path]:
    """The name that a module is imported by -> its file."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(part for part in parts if part != "__init__")
            found[name if folder == "penstock" else f"penstock.{name}"] = path
    return found


def imported(tree: ast.AST, modules: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that a file imports, by `from module import name` as by `from package import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules else node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def asks_for_none(tree: ast.AST) -> int:
    """How many lines ask whether something is None."""
    return len(
        {
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Compare)
            and any(isinstance(each, ast.Is | ast.IsNot) for each in node.ops)
            and any(isinstance(each, ast.Constant) and each.value is None for each in node.comparators)
        }
    )


def lines(path: Path) -> int:
    """Of a file, as `wc -l` counts them."""
    return path.read_text().count("\n")


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--request", action="store_true", help="serve one chat request, too")
    wants_request = parser.parse_args().request
    modules = sources()
    trees = {name: ast.parse(path.read_text()) for name, path in modules.items()}
    importers = Counter[str]()
    for name, tree in trees.items():
        importers.update({each for each in imported(tree, modules) if each in modules and each != name})
    own = {name: path for name, path in modules.items() if path.name not in ("__init__.py", "__main__.py")}
    single = [path for name, path in own.items() if importers[name] == 1]
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    methods = {node.name: sum(isinstance(each, functions) for each in node.body) for node in classes}
    arguments = {
        node.name: len(each.args.args) + len(each.args.kwonlyargs) - 1
        for node in classes
        for each in node.body
        if isinstance(each, functions) and each.name == "__init__"
    }
    print("options:", len(flags()))
    print("rooms (folders with sources):", len({path.parent for path in modules.values()}))
    print("files:", len(modules), " lines:", sum(lines(path) for path in modules.values()))
    for folder in FOLDERS:
        inside = [path for path in modules.values() if path.is_relative_to(ROOT / folder)]
        print(f"    {folder:<11} {len(inside):4} files {sum(map(lines, inside)):7} lines")
    print(
        "files with a single importer:", len(single), " of these, up to 80 lines:", sum(lines(p) <= 80 for p in single)
    )
    print("lines that ask for None:")
    counts = Counter({str(path.relative_to(ROOT)): asks_for_none(trees[name]) for name, path in modules.items()})
    print(*(f"    {count:4} {path}" for path, count in counts.most_common(5)), sep="\n")
    for what, found, most in (("methods", methods, MOST_METHODS), ("constructor arguments", arguments, MOST_ARGUMENTS)):
        beyond = Counter({name: count for name, count in found.items() if count > most})
        print(f"classes of more than {most} {what}:", len(beyond))
        print(*(f"    {count:4} {name}" for name, count in beyond.most_common(5)), sep="\n")
    if wants_request:
        entered = {path for paths in asyncio.run(files_of_a_request()).values() for path in paths}
        print(
            "a plain chat request enters:", len(entered), "files,", sum(lines(ROOT / path) for path in entered), "lines"
        )


if __name__ == "__main__":
    main()
