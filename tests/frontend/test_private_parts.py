"""Which private parts of other libraries are used, and that their absence is told."""

import re
from pathlib import Path

import pytest

from penstock.core.config import ConfigError
from penstock.frontend.http import private_parts

FOLDER = Path(private_parts.__file__).parent
# Every use of a name with an underscore on something that is not our own; "super()." and class attributes included.
USED = {
    "connections.py": (
        *(
            "_buffer_paused",
            "_connections",
            "_force_close",
            "_kwargs",
            "_loop",
            "_make_server",
            "_manager",
            "_messages",
        ),
        *("_paused", "_reading_paused", "_request_count", "_server", "_sock", "_backlog", "_ssl_context", "_runner"),
    ),
    "chat_template.py": ("_output_child_to_const",),
}


def test_the_installed_libraries_have_them() -> None:
    private_parts.check_private_parts()


def test_what_is_used_is_checked() -> None:
    checked = {name for classes in private_parts._PARTS.values() for names in classes.values() for name in names}
    for file, names in USED.items():
        text = (FOLDER / file).read_text()
        for name in names:
            assert re.search(rf"\b{name}\b", text), f"{file} does not use {name} any more"
            assert name in checked


@pytest.mark.parametrize("library", ["aiohttp", "jinja2"])
def test_an_absent_part_is_named(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    owner = next(iter(private_parts._PARTS[library]))
    monkeypatch.setitem(private_parts._PARTS[library], owner, ("_was_there_once",))
    with pytest.raises(ConfigError, match=rf"{library} [\d.]+ has no {owner.__name__}\._was_there_once"):
        private_parts.check_private_parts()
