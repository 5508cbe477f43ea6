"""Writes the table of tool formats into `tool-calling.md`, from the registry, so that none can be forgotten.

python docs/tool_table.py            # write it
python docs/tool_table.py --check    # exit 1 if it is not what would be written
"""

import sys
from pathlib import Path

from penstock.frontend.parsing.tool_formats.registry import TOOL_FORMATS

PAGE = Path(__file__).parent / "tool-calling.md"

_BEGIN = "<!-- The table is written by docs/tool_table.py: run `make docs` after adding a format. -->\n"
_END = "<!-- End of the table. -->\n"


def table() -> str:
    """The table as Markdown."""
    rows = ["| `--tool-call-parser` | models | a call |", "| --- | --- | --- |"]
    for name in sorted(TOOL_FORMATS):
        tool_format = TOOL_FORMATS[name]
        example = tool_format.example.replace("\n", "↵").replace("|", "\\|")
        quotes = "``" if "`" in example else "`"
        rows.append(f"| `{name}` | {', '.join(tool_format.models)} | {quotes}{example}{quotes} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """The whole page, with the table that belongs there."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{table()}{_END}{after}"


def main() -> int:
    """Write the table, or check it; the exit code."""
    wanted = page()
    if sys.argv[1:] == ["--check"]:
        if PAGE.read_text() == wanted:
            return 0
        print(f"{PAGE} does not fit the tool formats: run `make docs`", file=sys.stderr)
        return 1
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
