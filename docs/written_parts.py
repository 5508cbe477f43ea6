"""Parts of pages that programs write: each between a line that says which program, and a line that ends it."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

END = "<!-- End of what is written. -->\n"


def with_parts(page: Path, parts: Mapping[str, str]) -> str:
    """The page's text with these parts, by the lines that begin them."""
    text = page.read_text()
    for begin, written in parts.items():
        before, found, rest = text.partition(begin)
        assert found, begin
        text = f"{before}{begin}{written}{END}{rest.partition(END)[2]}"
    return text


def write_or_check(page: Path, whole: Callable[[], str]) -> int:
    """Write the page, or with `--check` compare it with what would be written; the exit code."""
    wanted = whole()
    if sys.argv[1:] != ["--check"]:
        page.write_text(wanted)
    elif page.read_text() != wanted:
        print(f"{page} does not show what the code has: run `make docs`", file=sys.stderr)
        return 1
    return 0
