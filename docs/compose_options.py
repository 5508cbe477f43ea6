"""Writes into `containers.md` which options are variables in `.env`, from compose.yaml and the options themselves.

python -m docs.compose_options            # write it
python -m docs.compose_options --check    # exit 1 if it is not what would be written
"""

import re
import sys
from pathlib import Path

from docs.written_parts import with_parts, write_or_check
from penstock.config.flags import flags

PAGE = Path(__file__).parent / "containers.md"
COMPOSE = Path(__file__).parent.parent / "compose.yaml"
_BEGIN = "<!-- This list is written by docs/compose_options.py: run `make docs` after a change. -->\n"
_WIDTH = 120


def not_passed_on() -> list[str]:
    """The variables of all options that no service takes from `.env`, in the order of the options."""
    passed_on = set(re.findall(r"\$\{(PENSTOCK_\w+)", COMPOSE.read_text()))
    return [flag.variable for flag in flags() if flag.variable not in passed_on]


def page() -> str:
    """The whole page, with the list."""
    lines = [""]
    words = [f"`{name}`," for name in not_passed_on()]
    for word in [*words[:-1], words[-1].replace(",", ".")]:
        joined = f"{lines[-1]} {word}".strip()
        if len(joined) <= _WIDTH:
            lines[-1] = joined
        else:
            lines.append(word)
    return with_parts(PAGE, {_BEGIN: "\n" + "\n".join(lines) + "\n\n"})


def main() -> int:
    """Write the list, or check it; the exit code."""
    return write_or_check(PAGE, page)


if __name__ == "__main__":
    sys.exit(main())
