"""Writes the tables of `migrating.md` from the code: options of other engines, and what replaces them.

python -m docs.foreign_flags_table            # write them
python -m docs.foreign_flags_table --check    # exit 1 if they are not what would be written
"""

import re
import sys
from pathlib import Path

from docs.written_parts import with_parts, write_or_check
from penstock.config.flags import flags
from penstock.config.foreign_flags import FLAGS_OF_ENGINES
from penstock.config.foreign_tables import VALUES, ForeignFlag

PAGE = Path(__file__).parent / "migrating.md"
_BEGIN = "<!-- The table of {} is written by docs/foreign_flags_table.py: run `make docs` after a change. -->\n"
_VALUES = "warning|json|static|torch|on|off|none"
_CODE = re.compile(
    rf"(?<!\S)(--[\w-]+(?: '.*'| (?:{_VALUES})\b)?|[A-Z]+(?:[_/@:][A-Z_.]+)+|[a-z]+_[a-z_]+(?:\.json)?|config\.json)"
)


def _with_code(text: str) -> str:
    return _CODE.sub(r"`\1`", text)


def _table(flags: dict[str, ForeignFlag]) -> str:
    """One row for each answer, with all options that have it."""
    names: dict[ForeignFlag, list[str]] = {}
    for name, flag in flags.items():
        names.setdefault(flag, []).append(f"`{name}`")
    rows = ["| option | here |", "| --- | --- |"]
    for flag, same in names.items():
        accepted = ", ".join(f"`{value}`" for value in flag.same if value)
        here = _with_code(flag.use or f"none: {flag.why}") + (f" (accepted: {accepted})" if accepted else "")
        rows.append(f"| {', '.join(same)} | {here} |")
    return "\n".join(rows) + "\n"


def _names_that_work() -> str:
    rows = ["| typed | means |", "| --- | --- |"]
    for flag in flags():
        if flag.shown.also:
            rows.append(f"| {', '.join(f'`{name}`' for name in flag.shown.also)} | `{flag.name}` |")
    return "\n".join(rows) + "\n"


def _values() -> str:
    """One row for each value of an option here, with the other engines' names of it."""
    rows = ["| option | value | here |", "| --- | --- | --- |"]
    for option, others in VALUES.items():
        names: dict[str, list[str]] = {}
        for other, own in others.items():
            names.setdefault(own, []).append(f"`{other}`")
        rows += [f"| `{option}` | {', '.join(same)} | `{own}` |" for own, same in names.items()]
    return "\n".join(rows) + "\n"


def page() -> str:
    """The whole page, with what belongs there."""
    tables = {engine: _table(dict(options)) for engine, options in FLAGS_OF_ENGINES.items()}
    tables |= {"names that work": _names_that_work(), "values": _values()}
    return with_parts(PAGE, {_BEGIN.format(what): f"\n{table}\n" for what, table in tables.items()})


def main() -> int:
    """Write the tables, or check them; the exit code."""
    return write_or_check(PAGE, page)


if __name__ == "__main__":
    sys.exit(main())
