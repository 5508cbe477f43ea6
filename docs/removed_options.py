"""Writes the table of removed options into the CHANGELOG, from `config/removed.py`.

python -m docs.removed_options            # write it
python -m docs.removed_options --check    # exit 1 if it is not what would be written
"""

import re
import sys
from pathlib import Path

from docs.written_parts import with_parts, write_or_check
from penstock.config.removed import REMOVED

PAGE = Path(__file__).parent.parent / "CHANGELOG.md"
_BEGIN = (
    "<!-- The table of removed options is written by docs/removed_options.py: run `make docs` after a change. -->\n"
)

_FLAG = re.compile(r"--[a-z][a-z-]+")


def _as_code(flag: re.Match[str]) -> str:
    return f"`{flag[0]}`"


def page() -> str:
    """The whole page, with the table."""
    rows = "".join(f"| `{flag}` | {_FLAG.sub(_as_code, instead)} |\n" for flag, instead in REMOVED.items())
    return with_parts(PAGE, {_BEGIN: f"\n| gone | instead |\n| --- | --- |\n{rows}\n"})


def main() -> int:
    """Write the table, or check it; the exit code."""
    return write_or_check(PAGE, page)


if __name__ == "__main__":
    sys.exit(main())
