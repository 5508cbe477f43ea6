"""Writes the tables of tool and reasoning formats into `tool-calling.md`, from the registries: none can be forgotten.

python -m docs.tool_table            # write it
python -m docs.tool_table --check    # exit 1 if it is not what would be written
"""

import sys
from pathlib import Path

from docs.written_parts import with_parts, write_or_check
from penstock.frontend.parsing.reasoning import REASONING_FORMATS
from penstock.frontend.parsing.tool_formats.registry import TOOL_FORMATS

PAGE = Path(__file__).parent / "tool-calling.md"
_BEGIN = "<!-- The table of {} is written by docs/tool_table.py: run `make docs` after adding one. -->\n"


def tool_formats() -> str:
    """The table of tool formats as Markdown."""
    rows = ["| `--tool-call-parser` | models | a call |", "| --- | --- | --- |"]
    for name in sorted(TOOL_FORMATS):
        tool_format = TOOL_FORMATS[name]
        rows.append(f"| `{name}` | {', '.join(tool_format.models)} | {_code(tool_format.example)} |")
    return "\n".join(rows) + "\n"


def reasoning_formats() -> str:
    """The table of reasoning formats as Markdown."""
    rows = ["| `--reasoning-parser` | models | reasoning and answer |", "| --- | --- | --- |"]
    for name in sorted(REASONING_FORMATS):
        marks = REASONING_FORMATS[name]
        before, behind = marks.answer or ("", "")
        if marks.has_channels:
            before = "<|start|>assistant<|channel|>final<|message|>"
        example = f"{marks.opening} … {marks.end}{before} … {behind}".rstrip()
        rows.append(f"| `{name}` | {', '.join(marks.models)} | {_code(example)} |")
    return "\n".join(rows) + "\n"


def _code(text: str) -> str:
    text = text.replace("\n", "↵").replace("|", "\\|")
    quotes = "``" if "`" in text else "`"
    return f"{quotes}{text}{quotes}"


def page() -> str:
    """The whole page, with the tables that belong there."""
    parts = {"tool formats": tool_formats(), "reasoning formats": reasoning_formats()}
    return with_parts(PAGE, {_BEGIN.format(what): table for what, table in parts.items()})


def main() -> int:
    """Write the tables, or check them; the exit code."""
    return write_or_check(PAGE, page)


if __name__ == "__main__":
    sys.exit(main())
