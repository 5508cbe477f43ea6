"""Which private parts of other libraries are used, and that their absence is told."""

import ast
from pathlib import Path

import pytest

from penstock.config import ConfigError
from penstock.frontend.http import private_parts

FRONTEND = Path(__file__).parents[3] / "frontend"


@pytest.mark.parametrize("file", ["http/connections.py", "text/chat_template.py"])
def test_what_is_used_is_checked(file: str) -> None:
    """Every attribute with an underscore that a file reads and does not make: `super()._name` and `self._name`, too."""
    nodes = list(ast.walk(ast.parse((FRONTEND / file).read_text())))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    made = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    made |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    checked = {name for classes in private_parts._PARTS.values() for names in classes.values() for name in names}
    private = {name for name in read if name.startswith("_") and not name.endswith("__")}
    assert private - made <= checked


def test_the_installed_libraries_have_them() -> None:
    private_parts.check_private_parts()


@pytest.mark.parametrize("library", ["aiohttp", "jinja2"])
def test_an_absent_part_is_named(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    owner = next(iter(private_parts._PARTS[library]))
    monkeypatch.setitem(private_parts._PARTS[library], owner, ("_was_there_once",))
    with pytest.raises(ConfigError, match=rf"{library} [\d.]+ has no {owner.__name__}\._was_there_once"):
        private_parts.check_private_parts()
